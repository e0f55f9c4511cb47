"""Decode one or several active blocks, on either grid; every pass computes the whole text.

Sub-blocks, edits and quotas are included.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dllm_plugin.reference.numbers import (
    RANDOM_ORDER,
    counter_uniform,
    factor_count,
    ranking,
)
from dllm_plugin.reference.prompt_blocks import Text

ANYWHERE = 10**9


@dataclass
class GridText(Text):
    """Hold a text whose blocks are counted from `origin`; the first may begin inside the prompt."""

    origin: int = 0
    lows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        start, size = len(self.prompt), self.block_length
        self.max_tokens = min(self.max_tokens, self.max_model_len - start)
        self.tokens = list(self.prompt)
        low = start - (start - self.origin) % size
        end = low + -(-(start + self.max_tokens - low) // size) * size
        end = min(end, self.max_model_len)
        self.lows = [*range(low, end, size), end]
        self.bounds = [start, *self.lows[1:]]

    def done(self, index: int) -> Tensor:
        """Return the decided share of a block in float32, as the plugin compares."""
        size = self.lows[index + 1] - self.lows[index]
        return torch.tensor((size - len(self.masked(index))) / size)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Compute as the parent, with blocks counted from `origin`."""
        block = [
            max(-1, p - self.origin) // self.block_length
            for p in range(len(self.tokens))
        ]
        logits = self.model.predictions(self.tokens, block)
        banned = logits.clone()
        banned[:, self.model.mask_id] = float("-inf")
        return logits, banned.softmax(-1)


@dataclass(frozen=True)
class Rules:
    """Say how many blocks, and what each step takes; by the names of the plugin's options.

    Policies other than `threshold` and `joint_threshold` are for one active block.
    """

    max_active_blocks: int = 1
    threshold: float = 0.9
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95
    steps: int | None = None
    sub_block_length: int | None = None
    editing_threshold: float | None = None
    max_post_steps: int = 16
    num_to_transfer: int = 1
    policy: str = "threshold"
    factor: float = 1.0
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Return these as a request's arguments; the policy is the engine's."""
        own = ("policy", "factor", "seed")
        given = {
            f"dllm_{k}": v
            for k, v in vars(self).items()
            if v is not None and k not in own
        }
        if self.editing_threshold is None:
            del given["dllm_max_post_steps"], given["dllm_num_to_transfer"]
        if self.max_active_blocks == 1:
            del given["dllm_block_add_threshold"], given["dllm_decoded_token_threshold"]
        return given


def active_blocks(text: GridText, rules: Rules, canvas_length: int) -> Text:
    """Decode until the answer is known; `text.passes` counts all passes."""
    edits, one = rules.editing_threshold is not None, rules.max_active_blocks == 1
    add = torch.tensor(1.0 if one else rules.block_add_threshold)
    activate = torch.tensor(1.0 if one else rules.decoded_token_threshold)
    first = opened = step = post = 0
    full, saw_stop, settled = {0}, False, 0 if edits else ANYWHERE
    while final(text, settled) is None:
        active = [i for i in range(first, opened) if text.masked(i)]
        if (
            opened < text.num_blocks
            and text.lows[opened + 1] - text.lows[first] <= canvas_length
            and len(active) < rules.max_active_blocks
            and not saw_stop
            and (opened == first or text.done(opened - 1) >= add)
        ):
            text.open_block(opened)
            active.append(opened)
            opened += 1
        full |= {i + 1 for i in range(first, opened) if text.done(i) >= activate} | {
            first
        }
        stored = (active[0] if active else opened) - first
        if edits:
            stored = min(stored, 1)
        text.passes += 1
        logits, probs = text.forward()
        replaced: list[int] = []
        if edits and (stored == 0 or post < rules.max_post_steps):
            replaced = edited(text, probs, first, rules)
        written: list[int] = []
        could = (
            [p for p in range(text.bounds[first], text.lows[first + 1])]
            if edits
            else []
        )
        for i in active:
            quota = (
                quota_of(rules, text.block_length, step)
                if i == active[0]
                else int(i in full)
            )
            allowed = candidates(text, i, rules)
            could += allowed
            written += picked(text, allowed, probs, quota, rules, text.passes - 1)
        keeps = stored > 0 and bool(replaced)
        if keeps:
            stored, written = 0, [] if one else written
            post += 1
        if active:
            step = (
                step + 1
                if set(candidates(text, active[0], rules)) - set(written)
                else 0
            )
        text.write(replaced + written, logits, probs)
        text.tell(logits, could)
        span = range(text.bounds[first], text.lows[opened])
        saw_stop = (saw_stop and not edits) or any(
            text.tokens[p] in text.stop for p in span
        )
        if edits:
            settled = text.lows[
                first + (stored or int(keeps and post == rules.max_post_steps))
            ]
        first, post = first + stored, post if keeps else 0
    return text


def final(text: GridText, settled: int) -> list[int] | None:
    """Return the answer, if it lies before a position behind which tokens may still change."""
    everything = text.tokens
    text.tokens = everything[:settled]
    answer, text.tokens = text.final(), everything
    return answer


def candidates(text: GridText, index: int, rules: Rules) -> list[int]:
    """Return the masked positions of a block's first sub-block that has any."""
    masked, low = text.masked(index), text.lows[index]
    size = rules.sub_block_length or text.block_length
    return [p for p in masked if (p - low) // size == (masked[0] - low) // size]


def quota_of(rules: Rules, size: int, step: int) -> int:
    """Count the positions that the first unfinished block takes at least."""
    if rules.editing_threshold is not None:
        return rules.num_to_transfer
    steps = rules.steps or size
    return size if step >= steps - 1 else size // steps + (step < size % steps)


def picked(
    text: GridText,
    masked: list[int],
    probs: Tensor,
    quota: int,
    rules: Rules,
    step: int,
) -> list[int]:
    """Return the positions that a block's policy takes; `step` counts its random numbers."""
    if rules.policy in ("threshold", "joint_threshold"):
        return sure_or_best(text, masked, probs, quota, rules)
    if not masked:
        return []
    scores = dict(
        zip(masked, ranking(probs[masked], rules.policy).tolist(), strict=True)
    )
    if rules.policy == "random":
        scores = {
            p: counter_uniform(rules.seed ^ RANDOM_ORDER, p, step) for p in masked
        }
    if rules.policy == "sequential":
        scores = {p: -float(p) for p in masked}
    order = sorted(masked, key=lambda p: (-scores[p], p))
    ranked = [scores[p] for p in order]
    if rules.policy == "factor":
        quota = factor_count(ranked, rules.factor)
        text.close_choice(
            *(ranked[j] - (1 - rules.factor / (j + 2)) for j in range(1, len(order)))
        )
    elif quota < len(order):
        text.close_choice(ranked[quota - 1] - ranked[quota])
    return order[:quota]


def sure_or_best(
    text: GridText, masked: list[int], probs: Tensor, quota: int, rules: Rules
) -> list[int]:
    """Return the positions above the threshold if they make up the quota, else the best ones."""
    confidence = {p: float(probs[p].amax()) for p in masked}
    order = sorted(masked, key=lambda p: (-confidence[p], p))
    sure = [p for p in masked if confidence[p] > float(torch.tensor(rules.threshold))]
    gaps = [abs(c - rules.threshold) for c in confidence.values()]
    if len(sure) < quota < len(order):
        gaps.append(confidence[order[quota - 1]] - confidence[order[quota]])
    text.close_choice(*gaps)
    return sure if len(sure) >= quota else order[:quota]


def edited(text: GridText, probs: Tensor, index: int, rules: Rules) -> list[int]:
    """Return decided positions of a block for which the model is sure of another token."""
    span = range(text.bounds[index], text.lows[index + 1])
    assert rules.editing_threshold is not None
    floor = float(torch.tensor(rules.editing_threshold))
    found = []
    for p in span:
        if text.tokens[p] == text.model.mask_id:
            continue
        best = probs[p].topk(2)
        if int(best.indices[0]) != text.tokens[p]:
            text.close_choice(float(best.values[0]) - floor)
            found += [p] if float(best.values[0]) > floor else []
        elif float(best.values[0]) > floor - 1e-3:
            text.close_call(float(best.values[0] - best.values[1]))
    return found
