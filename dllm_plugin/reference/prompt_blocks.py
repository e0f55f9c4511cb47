"""Decode blocks behind a prompt: D2F and block diffusion; every pass computes the whole text."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dllm_plugin.reference.model import Forward
from dllm_plugin.reference.numbers import (
    RANDOM_ORDER,
    counter_uniform,
    dream_quota,
    factor_count,
    final_answer,
    float32,
    llada_quota,
    ranking,
)
from dllm_plugin.reference.watch import Watched


@dataclass
class Text(Watched):
    """Hold a text being decoded, and what happened on the way.

    bounds   first positions of the response blocks and the end of the last one
    raw      per position: raw logits of the row that predicted it when it was unmasked
    passes   denoising passes; commit_passes: passes that only stored a finished block
    """

    model: Forward
    prompt: list[int]
    max_tokens: int
    block_length: int
    stop: Collection[int] = ()
    max_model_len: int = 10**9
    bounds: list[int] = field(init=False)
    tokens: list[int] = field(init=False)
    raw: dict[int, Tensor] = field(default_factory=dict)
    passes: int = 0
    commit_passes: int = 0

    def __post_init__(self) -> None:
        start = len(self.prompt)
        self.max_tokens = min(self.max_tokens, self.max_model_len - start)
        whole = -(-self.max_tokens // self.block_length) * self.block_length
        end = min(start + whole, self.max_model_len)
        self.bounds = [*range(start, end, self.block_length), end]
        self.tokens = list(self.prompt)

    @property
    def num_blocks(self) -> int:
        """Return the number of response blocks of the whole text."""
        return len(self.bounds) - 1

    def open_block(self, index: int) -> None:
        """Append the masks of a block."""
        self.tokens += [self.model.mask_id] * (
            self.bounds[index + 1] - self.bounds[index]
        )

    def masked(self, index: int) -> list[int]:
        """Return the undecided positions of a block."""
        span = range(self.bounds[index], self.bounds[index + 1])
        return [p for p in span if self.tokens[p] == self.model.mask_id]

    def forward(self) -> tuple[Tensor, Tensor]:
        """Compute raw logits per position, and probabilities with the mask token banned."""
        start = len(self.prompt)
        block = [0] * start + [
            1 + (p - start) // self.block_length for p in range(start, len(self.tokens))
        ]
        logits = self.model.predictions(self.tokens, block)
        banned = logits.clone()
        banned[:, self.model.mask_id] = float("-inf")
        return logits, banned.softmax(-1)

    def write(self, positions: list[int], logits: Tensor, probs: Tensor) -> bool:
        """Unmask positions with their most probable token; True if a stop token is among them."""
        for p in positions:
            self.tokens[p] = int(probs[p].argmax())
            self.raw[p] = logits[p]
            self.written[p] = self.tokens[p]
            best = probs[p].log().topk(2).values
            self.close_call(float(best[0] - best[1]))
        return any(self.tokens[p] in self.stop for p in positions)

    def final(self) -> list[int] | None:
        """Return the answer, once a leading run of decided tokens holds all of it."""
        decided = self.tokens[len(self.prompt) :]
        return final_answer(decided, self.model.mask_id, self.stop, self.max_tokens)

    def answer(self) -> list[int]:
        """Return the answer of a finished text."""
        answer = self.final()
        assert answer is not None
        return answer


def d2f(
    text: Text,
    threshold: float = 0.9,
    block_add_threshold: float = 0.1,
    decoded_token_threshold: float = 0.95,
    policy: str = "threshold",
    canvas_length: int = 10**9,
    max_active_blocks: int = 10**9,
) -> Text:
    """Decode by D2F (arXiv 2508.09192), ending as soon as the answer is known."""
    opened, stored, saw_stop = 0, 0, False
    full: set[int] = {0}

    def done(index: int) -> float:
        if index < 0:
            return 1.0
        size = text.bounds[index + 1] - text.bounds[index]
        # In float32, as the plugin compares.
        return float(torch.tensor((size - len(text.masked(index))) / size))

    while text.final() is None:
        fits = opened < text.num_blocks and (
            text.bounds[opened + 1] - text.bounds[stored] <= canvas_length
            and opened - stored < max_active_blocks
        )
        if fits and not saw_stop and done(opened - 1) >= float32(block_add_threshold):
            text.open_block(opened)
            opened += 1
        full |= {
            i + 1
            for i in range(-1, opened)
            if done(i) >= float32(decoded_token_threshold)
        }
        finished = [not text.masked(i) for i in range(stored, opened)]
        text.passes += 1
        logits, probs = text.forward()
        confidence, score = probs.amax(-1), ranking(probs, policy)
        open_positions: list[int] = []
        for i in range(stored, opened):
            masked = text.masked(i)
            take = [p for p in masked if confidence[p] > threshold]
            gaps = [abs(float(confidence[p]) - threshold) for p in masked]
            if masked and not take and i in full:
                order = sorted(masked, key=lambda p: (-float(score[p]), p))
                take = order[:1]
                gaps += [float(score[order[0]] - score[p]) for p in order[1:2]]
            text.close_choice(*gaps)
            open_positions += masked
            saw_stop |= text.write(take, logits, probs)
        text.tell(logits, open_positions)
        stored += (finished + [False]).index(False)
    return text


def block_diffusion(
    text: Text,
    policy: str = "threshold",
    threshold: float = 0.9,
    steps: int | None = None,
    factor: float = 1.0,
    eps: float = 1e-3,
    seed: int = 0,
) -> Text:
    """Decode by block diffusion in two passes: denoise a block to its end, then store it."""
    for block in range(text.num_blocks):
        text.open_block(block)
        size = len(text.masked(block))
        step, num_steps = 0, steps or text.block_length
        while left := text.masked(block):
            logits, probs = text.forward()
            score = ranking(probs, policy)
            if policy == "random":
                score = torch.tensor(
                    [
                        counter_uniform(seed ^ RANDOM_ORDER, p, text.passes)
                        for p in range(len(text.tokens))
                    ]
                )
            order = sorted(left, key=lambda p: (-float(score[p]), p))
            ranked = [float(score[p]) for p in order]
            if policy == "threshold":
                count = max(1, sum(c > float32(threshold) for c in ranked))
            elif policy == "factor":
                count = factor_count(ranked, factor)
            elif text.model.shift:
                count = dream_quota(len(left), num_steps, step, eps)
            else:
                count = llada_quota(size, num_steps, step)
            text.close_choice(*_gaps(ranked, count, policy, threshold, factor))
            text.write(order[:count], logits, probs)
            text.tell(logits, left)
            step += 1
            text.passes += 1
            if text.final() is not None:
                return text
        text.commit_passes += 1
    return text


def _gaps(
    ranked: list[float], count: int, policy: str, threshold: float, factor: float
) -> list[float]:
    """Return how far the falling scores were from another count."""
    if policy == "threshold":
        return [score - threshold for score in ranked[1:]]
    if policy == "factor":
        return [ranked[j] - (1 - factor / (j + 2)) for j in range(1, len(ranked))]
    return [ranked[count - 1] - ranked[count]] if 0 < count < len(ranked) else []
