"""The compiled step: one graph, the same text, and nothing compiled once requests run."""

from typing import Any

import pytest
import torch
from mixed import BLOCK, D2F, ONE_BLOCK, SEVERAL, check_alike, check_steps

from dllm_plugin.kernels import reference


@pytest.mark.parametrize(
    ("dllm", "shift"),
    [
        (D2F, True),
        (D2F | {"policy": "entropy"}, False),
        (ONE_BLOCK, False),
        (BLOCK | {"policy": "low_confidence"}, False),
        (BLOCK | {"policy": "factor"}, True),
    ],
    ids=["d2f", "d2f-entropy", "one-block", "low_confidence", "factor"],
)
def test_compiled_steps_take_the_same_decisions(dllm: dict[str, Any], shift: bool) -> None:
    """Traced and not translated, which takes minutes here; tests/gpu runs real code."""
    check_alike(dllm, shift, "eager")


def test_other_policies_run_uncompiled() -> None:
    """In between; steps before and behind them are compiled."""
    sizes, passes = check_steps(BLOCK, False, "eager", SEVERAL)
    assert len(sizes) > 10 and max(sizes) > 2 and sum(sizes) < passes


def test_both_forms_of_ranking_agree() -> None:
    """What compiled code counts is what other code sorts."""
    generator = torch.Generator().manual_seed(3)
    for positions, slots in ((1, 1), (7, 2), (33, 5)):
        score = torch.randint(0, 5, (40, positions), generator=generator).float()
        score[score == 0] = -float("inf")
        candidates = torch.rand(40, positions, generator=generator) < 0.6
        block = torch.randint(0, slots + 1, (40, positions), generator=generator)
        counted = reference._rank_by_counting(score, candidates, None)
        assert torch.equal(counted, reference.rank(score, candidates))
        of_none = block.where(candidates, slots)
        counted = reference._rank_by_counting(score, candidates, of_none)
        sorted_ranks = reference.rank_in_block(score, candidates, block, slots)
        assert torch.equal(counted[candidates], sorted_ranks[candidates])
        best = reference.best_per_block(score, candidates & (block < slots), block, slots)
        first = candidates & (block < slots) & (counted == 0)
        assert torch.equal(best, first)
