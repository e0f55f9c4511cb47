"""The compiled step: one graph, the same text, and nothing compiled once requests run."""

from typing import Any

import pytest
import torch
from mixed import (
    BLOCK,
    D2F,
    ONE_BLOCK,
    SEVERAL,
    check_alike,
    check_steps,
    fresh_compiler,
)
from scripted import Loop

from dllm_plugin.decoding import blocks

pytestmark = pytest.mark.slow

KINDS = {
    "d2f": (D2F, True),
    "d2f-entropy": (D2F | {"policy": "entropy"}, False),
    "one-block": (ONE_BLOCK, False),
    "low_confidence": (BLOCK | {"policy": "low_confidence"}, False),
    "factor": (BLOCK | {"policy": "factor"}, True),
}


@pytest.mark.parametrize(("dllm", "shift"), KINDS.values(), ids=KINDS)
def test_compiled_steps_take_the_same_decisions(
    dllm: dict[str, Any], shift: bool
) -> None:
    """Traced and not translated, which takes minutes here; tests/gpu runs real code."""
    check_alike(dllm, shift, "eager")


def test_other_policies_run_uncompiled() -> None:
    """In between; steps before and behind them are compiled."""
    sizes, passes = check_steps(BLOCK, False, "eager", SEVERAL)
    assert len(sizes) > 10 and max(sizes) > 2 and sum(sizes) < passes


def test_unlike_engines_in_one_process() -> None:
    """Torch gives up on code that it has compiled too often: here twice for each engine."""
    loops = [Loop(*KINDS[kind]) for kind in ("one-block", "factor")]
    limit = torch._dynamo.config.patch(recompile_limit=3)
    with fresh_compiler(), torch.inference_mode(), limit:
        for loop in loops:
            loop.sampler.compile("eager")


def test_both_forms_of_ranking_agree() -> None:
    """What compiled code counts is what other code sorts."""
    generator = torch.Generator().manual_seed(3)
    for positions, slots in ((1, 1), (7, 2), (33, 5)):
        score = torch.randint(0, 5, (40, positions), generator=generator).float()
        score[score == 0] = -float("inf")
        candidates = torch.rand(40, positions, generator=generator) < 0.6
        block = torch.randint(0, slots + 1, (40, positions), generator=generator)
        counted = blocks._rank_by_counting(score, candidates, None)
        assert torch.equal(counted, blocks.rank(score, candidates))
        of_none = block.where(candidates, slots)
        counted = blocks._rank_by_counting(score, candidates, of_none)
        sorted_ranks = blocks.rank_in_block(score, candidates, block, slots)
        assert torch.equal(counted[candidates], sorted_ranks[candidates])
