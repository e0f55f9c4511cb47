"""Batches of floating canvases with their sequences, for the reference and the kernel."""

import random
from typing import Any, NamedTuple

import torch

from dllm_plugin.kernels.floating import Rules, Texts

MASK = 500
FAR = 10**6


def by_hand(
    canvas: list[int], start: int, end: int, width: int, rules: Rules
) -> list[int]:
    """Where the sequences of a canvas end, one position at a time."""
    run = 0
    while run < width and canvas[run] != MASK:
        run += 1
    first = canvas.index(MASK) if MASK in canvas else len(canvas)
    stop = min(-(-end // rules.length) * rules.length, rules.context) - start
    while (
        rules.on_grid
        and stop + start > ((start + first) // rules.length + 1) * rules.length
    ):
        stop -= 1
    window = max(min(stop, width), run)
    parts = -(-len(canvas) // rules.length)
    return [
        run,
        *(min(run + k * rules.length, window) for k in range(1, parts + 1)),
        width,
    ]


class Batch(NamedTuple):
    """Arguments of `lay_out` without its results, and what they should be."""

    arguments: list[Any]
    start_loc: list[int]
    keys: list[int]


def a_batch(seed: int) -> Batch:
    """Canvases of 1 to 5 requests in slots out of order, of any width."""
    rng = random.Random(seed)
    num, length = rng.choice([5, 16, 33, 128]), rng.choice([1, 4, 16, 32])
    rules = Rules(length, bool(seed % 2), rng.choice([200, FAR]), MASK)
    requests, slots = rng.randint(1, 5), 7
    canvases, texts, locs, seen, expected = [], [], [0], [], []
    for _ in range(slots):
        decided = rng.choice([0.0, 0.5, 0.9, 1.0])
        canvas = [1 if rng.random() < decided else MASK for _ in range(num)]
        start = rng.randint(1, 60)
        origin = (
            0 if rules.on_grid else start - rng.randint(0, start) // length * length
        )
        canvases.append(canvas)
        texts.append((start, origin, start + rng.randint(1, 2 * num)))
    chosen = rng.sample(range(slots), requests)
    for slot in chosen:
        start, origin, end = texts[slot]
        width = rng.randint(1, num)
        # `by_hand` counts blocks from position 0.
        moved = rules._replace(context=rules.context - origin)
        ends = by_hand(canvases[slot], start - origin, end - origin, width, moved)
        expected.append((locs[-1], ends))
        locs.append(locs[-1] + width)
        seen.append(start + width)
    starts = [low + begin for low, ends in expected for begin in (0, *ends[:-1])]
    keys = [
        texts[slot][0] + end
        for slot, (_, ends) in zip(chosen, expected, strict=True)
        for end in ends
    ]
    columns = [torch.tensor(column) for column in zip(*texts, strict=True)]
    arguments = [
        torch.tensor(canvases),
        torch.tensor(chosen),
        Texts(*columns),
        torch.tensor(locs, dtype=torch.int32),
        torch.tensor(seen, dtype=torch.int32),
        rules,
    ]
    return Batch(arguments, [*starts, locs[-1]], keys)
