"""Floating canvases: run, window and rest, their sequences and their candidates."""

from typing import Any, NamedTuple

import pytest
import torch
from floating_batches import FAR, MASK, a_batch
from torch import Tensor

from dllm_plugin.decoding.floating import block_slots, plan_floating
from dllm_plugin.decoding.plan import Canvas
from dllm_plugin.kernels.floating import (
    Rules,
    Texts,
    lay_out_reference,
    split,
    stops,
)


class Case(NamedTuple):
    """A canvas in letters, its width, and what a step makes of it; keys count from its start."""

    canvas: str
    width: int
    rows: list[tuple[int, int]]
    candidates: list[int]
    committed: int
    shift: int = 0
    length: int = 32
    grid_start: int | None = None


CASES = [
    Case("abMcMMMM", 6, [(2, 2), (4, 6)], [2, 4, 5], 2),
    Case("abMcMMMM", 6, [(2, 2), (4, 6)], [2, 4, 5, 6], 2, shift=1),
    Case("abcdMMMM", 2, [(2, 2)], [], 2),
    Case("abcdMMMM", 2, [(2, 2)], [], 2, shift=1),
    Case("aMMM", 1, [(1, 1)], [1], 1, shift=1),
    Case("aMMM", 2, [(1, 1), (1, 2)], [1], 1),
    Case("MMMM", 2, [(2, 2)], [0], 0),
    Case("MMMM", 1, [(1, 1)], [0], 0, shift=1),
    Case("MMMM", 3, [(3, 3)], [0, 1, 2], 0),
    Case("MMMM", 3, [(3, 3)], [0, 1, 2, 3], 0, shift=1),
    Case("aMMMMM", 6, [(1, 1), (1, 2), (4, 6)], [1], 1, length=4, grid_start=10),
    Case(
        "aMMMMM", 6, [(1, 1), (1, 2), (4, 6)], [1], 1, shift=1, length=4, grid_start=10
    ),
    Case(
        "aMMMMMMMMM",
        10,
        [(1, 1), (4, 5), (4, 9), (1, 10)],
        list(range(1, 10)),
        1,
        length=4,
    ),
]


def tokens_of(canvas: str) -> Tensor:
    return torch.tensor([[MASK if c == "M" else ord(c) for c in canvas]])


def view(tokens: Tensor, texts: Texts, width: Tensor, rules: Rules, shift: int) -> Any:
    """The canvas as a strategy sees it, as the states make it."""
    parts = -(-tokens.shape[1] // rules.length)
    found = split(tokens, texts, width, rules)
    ends = stops(found, width, rules.length, parts)
    sizes = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))[:, :-1]
    slots = block_slots(*found, width, rules.length, parts + 1, shift, tokens.shape[1])
    nothing = torch.zeros(len(tokens), dtype=torch.bool)
    fields: dict[str, Any] = dict.fromkeys(Canvas._fields, nothing)
    fields |= {"tokens_RC": tokens, "block_RC": slots, "size_RS": sizes.to(torch.int32)}
    return Canvas(**fields | {"open_R": nothing.to(torch.int32)}), ends


@pytest.mark.parametrize("case", CASES)
def test_what_a_step_makes_of_a_canvas(case: Case) -> None:
    start = case.grid_start or 0
    texts = Texts(*(torch.tensor([x]) for x in (start, 0, FAR)))
    rules = Rules(case.length, case.grid_start is not None, FAR, MASK)
    tokens, width = tokens_of(case.canvas), torch.tensor([case.width])
    canvas, ends = view(tokens, texts, width, rules, case.shift)
    plan = plan_floating(canvas, MASK)
    assert plan.candidates_RC[0].nonzero().flatten().tolist() == case.candidates
    assert plan.num_committed_R.tolist() == [case.committed]
    lengths = ends[0].diff(prepend=torch.zeros(1, dtype=torch.int64))
    rows = [(int(n), int(end)) for n, end in zip(lengths, ends[0], strict=True) if n]
    assert rows == case.rows
    assert plan.full_RS[0].tolist() == [i == 1 for i in range(plan.full_RS.shape[1])]


def test_sequences_of_many_canvases() -> None:
    for seed in range(1000):
        batch = a_batch(seed)
        start_loc = torch.full((len(batch.start_loc),), -1, dtype=torch.int32)
        keys = torch.full((len(batch.keys),), -1, dtype=torch.int32)
        lay_out_reference(*batch.arguments, start_loc, keys)
        assert start_loc.tolist() == batch.start_loc and keys.tolist() == batch.keys
