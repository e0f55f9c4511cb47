"""Policies on hand-made canvases: ties, NaN, quotas, schedules, the factor rule."""

from typing import Any

import handmade
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dllm_plugin.decoding.plan import Proposal
from dllm_plugin.decoding.policies import (
    DREAM_LOOP,
    EDITED_BLOCKS,
    PROMPT_BLOCKS,
    PROMPT_BLOCKS_IN_TIME,
)
from dllm_plugin.decoding.quotas import rounded_quota, step_with_quota
from dllm_plugin.reference import numbers
from dllm_plugin.reference.numbers import dream_quota, factor_count, llada_quota

# Every rule by one of its names; schedules are LLaDA's.
RULES = {**EDITED_BLOCKS, **DREAM_LOOP, **PROMPT_BLOCKS}

NAN = float("nan")
TO_COPY = torch.ops.aten._to_copy.default


def pick(
    policy: str,
    score: Any,
    candidates: Any = None,
    confidence: Any = None,
    step: Any = 0,
    steps: Any = 1,
    block_length: int | None = None,
    full: Any = True,
    time_schedule: bool = False,
    **options: Any,
) -> Tensor:
    """One policy over rows of scores, bool ``[R, C]``; all positions are candidates by default."""
    score_RC = torch.tensor(score, dtype=torch.float32)
    candidates_RC = torch.ones_like(score_RC, dtype=torch.bool)
    if candidates is not None:
        candidates_RC = torch.tensor(candidates, dtype=torch.bool)
    sure = (
        score_RC
        if confidence is None
        else torch.tensor(confidence, dtype=torch.float32)
    )
    canvas = handmade.canvas(*score_RC.shape, block_length, full, step=step)
    proposal = Proposal(torch.zeros_like(canvas.tokens_RC), sure, score_RC)
    table = PROMPT_BLOCKS_IN_TIME if time_schedule else RULES
    return table[policy].rule(
        handmade.plan(canvas, candidates_RC),
        canvas,
        proposal,
        handmade.settings(canvas, steps, **options),
    )


def taken(mask_RC: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in mask_RC]


@pytest.mark.parametrize("policy", list(RULES))
def test_takes_only_candidates(policy: str) -> None:
    generator = torch.Generator().manual_seed(1)
    score = torch.rand(64, 12, generator=generator)
    candidates = torch.rand(64, 12, generator=generator) < 0.5
    result = pick(policy, score.tolist(), candidates.tolist(), steps=4)
    assert not (result & ~candidates).any()
    # `origin` draws, and may draw nothing.
    assert policy == "origin" or result.any(dim=1)[candidates.any(dim=1)].all()


@pytest.mark.parametrize("policy", list(RULES))
def test_nothing_to_take(policy: str) -> None:
    none = [[False] * 4] * 2
    assert taken(
        pick(policy, [[0.99, 0.5, NAN, 0.1]] * 2, none, step=[0, 7], steps=3)
    ) == [[], []]


@pytest.mark.parametrize("policy", ["threshold", "low_confidence", "factor"])
def test_ties_go_to_the_lower_position(policy: str) -> None:
    candidates = [[False, True, True, True, True]]
    factor = 0.5  # a limit of 5/6 for the second best, which is not met
    result = pick(policy, [[0.5] * 5], candidates, steps=4, factor=factor)
    assert taken(result) == [[1]]


@pytest.mark.parametrize(
    "policy", ["low_confidence", "entropy", "topk_margin", "random"]
)
def test_schedule_takes_its_quota_of_bad_scores(policy: str) -> None:
    """A candidate without a usable score still goes before a position that is no candidate."""
    score = [[0.9, NAN, float("-inf"), 0.8, NAN], [0.9] + [float("-inf")] * 4]
    candidates = [[False, True, True, False, True], [False, False, True, True, False]]
    for steps, count in ((1, [3, 2]), (2, [2, 1]), (3, [1, 1])):
        result = pick(policy, score, candidates, steps=steps)
        assert [len(row) for row in taken(result)] == count
        assert not (result & ~torch.tensor(candidates)).any()


def test_threshold_is_strict_and_reads_the_confidence() -> None:
    score, confidence = [[0.1, 0.9, 0.2]], [[0.5, 0.4, 0.6]]
    assert taken(pick("threshold", score, confidence=confidence, threshold=0.5)) == [
        [2]
    ]
    assert taken(pick("threshold", score, confidence=confidence, threshold=0.6)) == [
        [1]
    ]
    assert taken(pick("threshold", [[1.0, 1.0]], threshold=1.0)) == [[0]]
    assert taken(pick("threshold", [[0.0, 0.0]], threshold=0.0)) == [[0]]


def test_threshold_forces_one_position_of_every_full_block() -> None:
    score = [[0.1, 0.2, 0.3, 0.3, 0.95, 0.5, 0.2, 0.1]]
    full = [True, False, True, True]
    result = pick("threshold", score, block_length=2, full=full)
    assert taken(result) == [[1, 4, 6]]


@pytest.mark.parametrize("steps", range(1, 12))
def test_llada_quotas_use_up_the_block(steps: int) -> None:
    for masks in range(1, 12):
        left, quotas = list(range(masks)), []
        for step in range(steps):
            candidates = [[p in left for p in range(masks)]]
            result = pick(
                "low_confidence", [[0.5] * masks], candidates, step=step, steps=steps
            )
            (gone,) = taken(result)
            left = [p for p in left if p not in gone]
            quotas.append(len(gone))
        assert (
            quotas == [llada_quota(masks, steps, step) for step in range(steps)]
            and not left
        )


@pytest.mark.parametrize("eps", [1e-3, 0.05])
def test_dream_time_schedule_is_float32(eps: float) -> None:
    """1 to 64 steps with 1 to 64 positions left, by the times that torch.linspace has."""
    masks = torch.arange(1, 65)
    candidates = (torch.arange(64) < masks[:, None]).tolist()
    score = [[0.5] * 64] * 64
    for steps in range(1, 65):
        times = torch.linspace(1, eps, steps + 1)
        for step in range(0, steps, max(1, steps // 8)):
            options: dict[str, Any] = {"step": step, "steps": steps, "eps": eps}
            result = pick(
                "low_confidence", score, candidates, time_schedule=True, **options
            )
            share = masks.float() * (1 - times[step + 1] / times[step])
            expected = masks if step == steps - 1 else share.to(torch.int64)
            # linspace rounds as the CPU's vectors go: a whole number may fall on either side.
            whole = ((share - share.round()).abs() < 1e-4) & (eps != 1e-3)
            same = (result.sum(dim=1) == expected) | whole
            assert same.all(), (steps, step)


def test_dream_takes_nothing_first_when_steps_equal_positions() -> None:
    """32 * (1 - 0.96878) is just under one: the definition truncates."""
    assert dream_quota(32, 32, 0, 1e-3) == 0
    assert taken(
        pick("low_confidence", [[0.5] * 32], steps=32, time_schedule=True)
    ) == [[]]


def test_a_schedule_past_its_last_step_takes_everything() -> None:
    """Positions that a bad word held back are not lost."""
    for time_schedule in (False, True):
        result = pick(
            "low_confidence", [[0.5] * 3], step=9, steps=4, time_schedule=time_schedule
        )
        assert taken(result) == [[0, 1, 2]]


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 2.5])
def test_factor_counts_like_the_reference(factor: float) -> None:
    rng = np.random.default_rng(3)
    for size in range(1, 9):
        rows = -np.sort(
            -(rng.random((40, size)) ** rng.choice([0.1, 0.5, 1], (40, 1))), axis=1
        )
        rows = rows.astype(np.float32)
        result = pick("factor", rows.tolist(), factor=factor)
        expected = [factor_count(row.tolist(), factor) for row in rows]
        assert [len(row) for row in taken(result)] == expected
        assert taken(result) == [list(range(n)) for n in expected]


def test_factor_always_takes_two_that_are_left() -> None:
    assert taken(pick("factor", [[0.01, 0.02], [1.0, 0.0]])) == [[0, 1], [0, 1]]
    assert taken(pick("factor", [[0.01, 0.02, 0.03]])) == [[2]]


def quotas_of_reference(left: int, steps: int) -> list[int]:
    """The quotas of A2D's steps, without steps whose quota is 0."""
    found = []
    for step in range(steps):
        if quota := numbers.rounded_quota(left, steps, step):
            found.append(quota)
            left -= quota
    return found


@pytest.mark.parametrize("quota", [rounded_quota, step_with_quota])
def test_no_rounding_of_quotas_is_compiled_away(quota: Any) -> None:
    """torch 2.11 compiles float64 to float32 to float64 as nothing at all."""
    number_R = torch.tensor([3, 5])
    graph = make_fx(quota)(number_R, number_R, number_R + 4).graph
    for node in graph.find_nodes(op="call_function", target=TO_COPY):
        source = node.args[0]
        widens = node.kwargs["dtype"] == torch.float64
        assert not (widens and source.target == TO_COPY), node


def test_rounded_quotas_are_those_of_the_reference() -> None:
    """For every number of masks and steps, step after step; none is left out or taken twice."""
    pairs = [(masks, steps) for masks in range(1, 40) for steps in range(1, 40)]
    pairs += [(128, 128), (100, 256), (32, 1000)]
    left_R, steps_R = torch.tensor(pairs).T
    step_R, found = torch.zeros_like(steps_R), [[] for _ in pairs]
    while left_R.any():
        step_R = step_with_quota(step_R, left_R, steps_R)
        quota_R = rounded_quota(step_R, left_R, steps_R) * (left_R > 0)
        for quotas, quota in zip(found, quota_R.tolist(), strict=True):
            quotas += [quota] if quota else []
        left_R, step_R = left_R - quota_R, step_R + 1
    assert found == [quotas_of_reference(*pair) for pair in pairs]
    assert quotas_of_reference(5, 2) == [2, 3], "not LLaDA's 3 and 2"
