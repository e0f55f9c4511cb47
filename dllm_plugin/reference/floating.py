"""Decode floating canvases by a schedule of widths; every pass computes the whole text."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dllm_plugin.reference.model import Forward
from dllm_plugin.reference.numbers import final_answer
from dllm_plugin.reference.watch import Watched


@dataclass
class FloatingText(Watched):
    """Hold a text of committed pieces, and the canvas behind them.

    on_grid    blocks lie at multiples of their length, from position 0 on
    canvas     decided tokens and masks
    pieces     ends of what was committed, absolute
    widths     positions of the canvas that each forward computed
    """

    model: Forward
    prompt: list[int]
    max_tokens: int
    block_length: int
    canvas_length: int
    on_grid: bool = False
    stop: Collection[int] = ()
    max_model_len: int = 10**9
    canvas: list[int] = field(init=False)
    committed: list[int] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.max_tokens = min(self.max_tokens, self.max_model_len - len(self.prompt))
        self.canvas = [self.model.mask_id] * self.canvas_length

    @property
    def passes(self) -> int:
        """Return how many forwards there were."""
        return len(self.widths)

    @property
    def start(self) -> int:
        """Return the absolute position of the canvas."""
        return len(self.prompt) + len(self.committed)

    @property
    def first(self) -> int:
        """Return the canvas position of the first mask, or the canvas's length."""
        return (self.canvas + [self.model.mask_id]).index(self.model.mask_id)

    def limit(self) -> int:
        """Return the canvas position where a window ends at most: with the text, or a block."""
        origin = 0 if self.on_grid else len(self.prompt)
        asked = len(self.prompt) + self.max_tokens - origin
        stop = min(
            origin - -asked // self.block_length * self.block_length, self.max_model_len
        )
        if self.on_grid:
            block = (self.start + self.first) // self.block_length
            stop = min(stop, (block + 1) * self.block_length)
        return stop - self.start

    def forward(self, run: int, window: int) -> tuple[Tensor, Tensor]:
        """Compute raw logits per position, and probabilities with the mask token banned.

        The canvas is computed up to the position `window`; a mask that nobody sees stands behind
        it, since models with shifted logits predict that position too.
        """
        size, masks = self.block_length, [self.model.mask_id]
        text = self.prompt + self.committed + self.canvas[:window] + masks
        blocks = [p // size if self.on_grid else 0 for p in range(len(self.prompt))]
        for low, high in zip(
            [len(self.prompt), *self.pieces], self.pieces, strict=False
        ):
            blocks += [blocks[-1] + 1] * (high - low)
        blocks += [blocks[-1] + 1] * run
        after = blocks[-1] + 1
        blocks += [after + i // size for i in range(window - run)]
        blocks.append(blocks[-1] + 1)
        logits = self.model.predictions(text, blocks)
        banned = logits.clone()
        banned[:, self.model.mask_id] = float("-inf")
        return logits, banned.softmax(-1)

    def commit(self, run: int) -> None:
        """Move the canvas behind its run."""
        self.committed += self.canvas[:run]
        if run:
            self.pieces.append(self.start)
        self.canvas = self.canvas[run:] + [self.model.mask_id] * run

    def final(self) -> list[int] | None:
        """Return the answer, once a leading run of decided tokens holds all of it."""
        decided = self.committed + self.canvas
        return final_answer(decided, self.model.mask_id, self.stop, self.max_tokens)

    def answer(self) -> list[int]:
        """Return the answer of a finished text."""
        answer = self.final()
        assert answer is not None
        return answer


def floating(
    text: FloatingText, schedule: Sequence[int], threshold: float = 0.9
) -> FloatingText:
    """Decode with the widths of a schedule, the last one for all further passes."""
    shift, size = int(text.model.shift), text.block_length
    while text.final() is None:
        width = schedule[min(text.passes, len(schedule) - 1)]
        width = min(width, text.max_model_len - text.start)
        first, limit = text.first, text.limit()
        run = min(first, width)
        window = max(run, min(width, limit))
        logits, probs = text.forward(run, window)
        reach = min(width + shift, limit, len(text.canvas))
        masks = [p for p in range(run, reach) if text.canvas[p] == text.model.mask_id]
        if width <= 2 - shift:
            masks = [p for p in masks if p == first]
        text.widths.append(width)
        base = text.start
        confidence = {p: float(probs[base + p].amax()) for p in masks}
        take = [p for p in masks if confidence[p] > float(torch.tensor(threshold))]
        gaps = [abs(c - threshold) for c in confidence.values()]
        part = [p for p in masks if p < run + size]
        if part and not set(part) & set(take):
            order = sorted(part, key=lambda p: (-confidence[p], p))
            take.append(order[0])
            gaps += [confidence[order[0]] - confidence[p] for p in order[1:2]]
        text.close_choice(*gaps)
        for p in take:
            text.canvas[p] = int(probs[base + p].argmax())
            text.written[base + p] = text.canvas[p]
            best = probs[base + p].log().topk(2).values
            text.close_call(float(best[0] - best[1]))
        text.tell(logits, [base + p for p in masks])
        text.commit(run)
    return text
