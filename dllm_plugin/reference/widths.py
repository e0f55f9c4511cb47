"""Decode a floating canvas by a schedule of widths; each forward computes the whole text."""

from .numbers import float32
from .proposing import best_first, propose
from .text import Text


def decode_widths(text: Text) -> None:
    """Decode until the answer is known.

    A forward computes the decided positions at the start of the canvas, its run, and
    the masks of its window; then the run is final and the canvas starts after it.
    """
    rules, shift = text.rules, int(text.model.shift)
    canvas = len(text.prompt)
    ends: list[int] = []  # of the runs
    while text.final() is None:
        text.append_masks(canvas + rules.canvas_length)
        width = rules.widths[min(len(text.forwards), len(rules.widths) - 1)]
        stop = min(canvas + width, text.max_model_len)
        length = len(text.tokens)
        first = next(iter(text.masked(canvas, length)), length)
        limit = _limit(text, first)
        run = min(first, stop)
        window = max(run, min(stop, limit))
        masks = text.masked(run, min(stop + shift, limit, len(text.tokens)))
        if stop - canvas <= 2 - shift:
            masks = [p for p in masks if p == first]
        # Models with shifted logits predict a position after the window too.
        blocks = [*_blocks(text, ends, run, window), FAR_BLOCK]
        tokens = [*text.tokens[:window], text.model.mask_id]
        logits = text.model.predictions(tokens, blocks)
        found = propose(text, logits[masks], masks, len(text.forwards))
        confidences = {p: found[p].confidence for p in masks}
        taken = [p for p in masks if confidences[p] > float32(rules.threshold)]
        text.close_choice(*(c - rules.threshold for c in confidences.values()))
        near = [p for p in masks if p < run + text.block_length]
        if near and not set(near) & set(taken):
            order = best_first(near, found)
            taken.append(order[0])
            for p in order[1:2]:
                text.close_choice(confidences[order[0]] - confidences[p])
        text.write_all(taken, found)
        text.end_forward(canvas, stop, window, found)
        if run > canvas:
            ends.append(run)
        canvas = run


FAR_BLOCK = 10**9  # the block of a mask that no position sees


def _limit(text: Text, first: int) -> int:
    """Return where a window ends at most: with the text, or with the block of a mask."""
    size = text.block_length
    if not text.rules.on_grid:
        return text.starts[-1]
    return min(text.starts[-1], (first // size + 1) * size)


def _blocks(text: Text, ends: list[int], run: int, window: int) -> list[int]:
    """Number the blocks of the positions up to `window`; a run is one block."""
    size, prompt = text.block_length, len(text.prompt)
    blocks = [p // size if text.rules.on_grid else 0 for p in range(prompt)]
    for end in [*ends, run]:
        blocks += [blocks[-1] + 1] * (end - len(blocks))
    after = blocks[-1] + 1
    return blocks + [after + i // size for i in range(window - run)]
