"""Partials of columns of the logits, and their merge: kernels against references and whole rows."""

from typing import Any

import pytest
import test_confidence
import torch
from test_confidence import CASES, Case, broken, broken_sampled, check
from torch import Tensor

from dllm_plugin.kernels.confidence import partial_reference
from dllm_plugin.kernels.confidence.reference import Columns, Reading, RowStats

SCAN = "dllm_plugin.kernels.confidence.kernel.scan_rows"
MERGE = "dllm_plugin.kernels.confidence.kernel.merge_rows"
RANKS = (2, 3)
# What partials cannot be asked for: tokens chosen before, and logits tempered before.
LEFT_OUT = ("chosen", "tempered_before")
NAMES = [(name, 2 + i % 2) for i, name in enumerate(CASES) if name not in LEFT_OUT]
NAMES += [("broken", 5), ("broken_sampled", 4), ("biased", 8), ("none_left", 2)]


def test_every_case_is_cut() -> None:
    assert set(LEFT_OUT) < set(CASES)


def shards(case: Case, ranks: int) -> list[tuple[Reading, Columns]]:
    """Arguments of each rank: as many columns as the others, behind the vocabulary numbers."""
    logits = case.arguments[0]
    vocab = logits.shape[1]
    # As vLLM pads: to a multiple that the number of ranks divides.
    width = -(-(vocab + 37) // ranks)
    padding = torch.full((len(logits), ranks * width - vocab), 99.0, dtype=logits.dtype)
    padded = torch.cat([logits, padding], dim=1)
    found = []
    for low in range(0, ranks * width, width):
        columns = padded[:, low : low + width].contiguous()
        rows = case.reading()._replace(logits_XV=columns)
        found.append((rows, Columns(low, vocab, ranks)))
    return found


def merging(case: Case) -> dict[str, Any]:
    return {
        k: case.options[k] for k in ("want_ranking", "num_rows") if k in case.options
    }


@pytest.fixture(scope="module")
def scanned(interpreter: Any) -> dict[tuple[str, int], Tensor]:
    """What the kernel says of every shard, from memory that was filled with NaN."""
    launches, bounds = [], [0]
    for name, ranks in NAMES:
        for arguments in shards(CASES[name](), ranks):
            launches.append((SCAN, None, list(arguments), {"programs": 6}))
        bounds.append(len(launches))
    partials = interpreter.run(launches)
    stacks = [
        torch.stack(partials[low:high])
        for low, high in zip(bounds, bounds[1:], strict=False)
    ]
    return dict(zip(NAMES, stacks, strict=True))


@pytest.fixture(scope="module")
def merged(
    interpreter: Any, scanned: dict[Any, Tensor]
) -> dict[tuple[str, int], RowStats]:
    cases = [CASES[name]() for name, _ in NAMES]
    launches = [
        (MERGE, None, [scanned[key]], merging(case))
        for key, case in zip(NAMES, cases, strict=True)
    ]
    return dict(zip(NAMES, interpreter.run(launches), strict=True))


@pytest.mark.parametrize(("name", "ranks"), NAMES)
def test_the_kernels_merge_to_whole_rows(
    name: str, ranks: int, merged: dict[Any, RowStats]
) -> None:
    check(CASES[name](), merged[name, ranks], name)


@pytest.mark.parametrize(("name", "ranks"), NAMES)
def test_the_reference_merges_to_whole_rows(
    name: str, ranks: int, scanned: dict[Any, Tensor]
) -> None:
    """Its own partials, and those of the kernel."""
    case = CASES[name]()
    kept = case.arguments[0].clone()
    partials = [partial_reference.scan_rows(*each) for each in shards(case, ranks)]
    for found in (torch.stack(partials), scanned[name, ranks]):
        check(case, partial_reference.merge_rows(found, **merging(case)), name)
    assert torch.equal(case.arguments[0].nan_to_num(9.5), kept.nan_to_num(9.5))


@pytest.mark.parametrize("width", [1, 2, 3, 64])
def test_narrow_shards(width: int) -> None:
    """A column each, and ranks whose columns are all padding."""
    for case in (
        test_confidence.greedy(3, 5, torch.float32),
        test_confidence.sampled(5, [0.7, 0]),
    ):
        logits, *rest = case.arguments
        ranks = max(2, -(-5 // width))
        padded = torch.nn.functional.pad(logits, (0, ranks * width - 5), value=50.0)
        partials = [
            partial_reference.scan_rows(
                Reading(padded[:, i * width : (i + 1) * width], *rest, **case.options),
                Columns(i * width, 5, ranks),
            )
            for i in range(ranks)
        ]
        check(
            case,
            partial_reference.merge_rows(torch.stack(partials), **case.options),
            "narrow",
        )


def test_ties_and_nan_lie_in_several_shards() -> None:
    """The cases above hold what a merge can get wrong."""
    for case in (broken(), broken_sampled()):
        for ranks in RANKS:
            width = shards(case, ranks)[0][0].logits_XV.shape[1]
            logits = case.arguments[0]
            nan_T, tied_T = logits[0].isnan().nonzero(), (logits[6] == 30.0).nonzero()
            assert len(set((nan_T // width).flatten().tolist())) >= 2
            assert len(set((tied_T // width).flatten().tolist())) >= 2
            assert logits[3].isinf().all()
