"""LLaDA2.1: which tokens may be replaced, which are, and what becomes of the step then."""

from typing import Any

import handmade
import numpy as np
import pytest
import torch
from handmade import committed
from scripted import Loop, sampling

from dllm_plugin.decoding.block_causal import (
    keep_edited,
    plan_edited_blocks,
)
from dllm_plugin.decoding.plan import Canvas, Proposal, StepPlan
from dllm_plugin.decoding.policies import joint_threshold
from dllm_plugin.sampling.features.bad_words import BadWords
from dllm_plugin.sampling.step import Step

MASK = handmade.MASK


def planned(
    tokens: list[int], length: int = 4, **fields: Any
) -> tuple[Canvas, StepPlan]:
    """The plan of one request that edits, with 16 steps left unless told otherwise."""
    fields = {"edits_R": [True], "edits_left_R": [16.0], "open_R": [1]} | fields
    canvas = handmade.canvas(1, len(tokens), length, False, [tokens], **fields)
    return canvas, plan_edited_blocks(canvas, MASK)


def places(mask_RC: torch.Tensor) -> list[int]:
    return mask_RC[0].nonzero().flatten().tolist()


def proposal(token: list[int], confidence: list[float]) -> Proposal:
    sure = torch.tensor([confidence])
    return Proposal(torch.tensor([token]), sure, sure)


def test_joint_threshold_replaces_surer_other_tokens() -> None:
    """Strictly above the editing threshold, another token, and where the plan allows it."""
    canvas, plan = planned([1, 2, 3, 4, MASK, MASK], 6, tail_R=[1])
    assert places(plan.editable_RC) == [1, 2, 3] and places(plan.candidates_RC) == [
        4,
        5,
    ]
    settings = handmade.settings(canvas, threshold=0.7, editing_threshold=0.5)
    offer = proposal([9, 9, 3, 9, 9, 9], [0.99, 0.51, 0.99, 0.5, 0.6, 0.65])
    assert places(joint_threshold(plan, canvas, offer, settings)) == [1, 5]
    settings = handmade.settings(
        canvas, threshold=0.7, editing_threshold=0.4, num_to_transfer=9
    )
    assert places(joint_threshold(plan, canvas, offer, settings)) == [1, 3, 4, 5]


def test_edits_end_with_the_steps_that_may_make_them() -> None:
    """While masks are left edits are free; without masks they count down."""
    _, busy = planned([1, MASK, 1, 1], edits_left_R=[0.0])
    assert places(busy.editable_RC) == [0, 2, 3] and not busy.checks_R.any()
    _, done = planned([1, 1, 1, 1], edits_left_R=[1.0])
    assert done.checks_R.all() and places(done.editable_RC) == [0, 1, 2, 3]
    _, spent = planned([1, 1, 1, 1], edits_left_R=[0.0])
    assert not spent.checks_R.any() and not spent.editable_RC.any()
    assert spent.num_committed_R.tolist() == [4] and spent.fixed_R.tolist() == [4]
    _, other = planned([1, 1, 1, 1], edits_R=[False])
    assert not other.checks_R.any() and not other.editable_RC.any()
    _, ended = planned([1, 1, 1, 1], ended_R=[True])
    assert not ended.editable_RC.any()


def test_only_committed_positions_are_settled() -> None:
    """Decided tokens in front of a mask may still change, so they end no request."""
    canvas, plan = planned([1, 1, MASK, MASK])
    assert plan.fixed_R.tolist() == [0]
    stop = torch.tensor([[False, True, False, False]])
    nothing, tokens = torch.zeros(1, 4, dtype=torch.bool), canvas.tokens_RC
    asked = torch.tensor([2], dtype=torch.int32)
    assert not committed(canvas, plan, nothing, tokens, stop, asked).ended_R.any()
    free, plan = planned([1, 1, MASK, MASK], edits_R=[False])
    assert committed(free, plan, nothing, tokens, stop, asked).ended_R.all()


@pytest.mark.parametrize("active,kept", [(1, [1]), (2, [1, 5])])
def test_an_edit_keeps_the_block(active: int, kept: list[int]) -> None:
    """One block at a time, what rode along was decided on other tokens: it is dropped."""
    tokens = [1, 1, 1, 1, MASK, MASK, MASK, MASK]
    canvas, plan = planned(tokens, max_active_R=[float(active)])
    assert plan.num_stored_R.tolist() == [1] and plan.active_RS.tolist() == [
        [False, True]
    ]
    unmask = torch.zeros(1, 8, dtype=torch.bool)
    unmask[0, [1, 5]] = True
    after, taken = keep_edited(canvas, plan, unmask)
    assert (after.num_stored_R.tolist(), after.num_committed_R.tolist()) == ([0], [0])
    assert after.fixed_R.tolist() == [0] and places(taken) == kept
    unmask[0, 1] = False
    after, taken = keep_edited(canvas, plan, unmask)
    assert after.num_committed_R.tolist() == [4] and after.fixed_R.tolist() == [4]
    assert places(taken) == [5]


def test_the_last_step_that_may_edit_settles_the_block() -> None:
    canvas, plan = planned([1, 1, 1, 1], edits_left_R=[1.0])
    unmask = torch.tensor([[True, False, False, False]])
    after, taken = keep_edited(canvas, plan, unmask)
    assert after.num_stored_R.tolist() == [0] and after.fixed_R.tolist() == [4]
    tokens = torch.tensor([[7, 1, 1, 1]])
    asked = torch.tensor([3], dtype=torch.int32)
    outcome = committed(canvas, after, taken, tokens, tokens == 99, asked)
    assert outcome.ended_R.all() and outcome.num_committed_R.tolist() == [3]


@pytest.mark.parametrize("left", [0.0, 3.0])
def test_each_block_is_checked_as_the_first(left: float) -> None:
    """Several finished blocks leave one by one, also when the first one's steps are spent."""
    tokens = [1, 1, 1, 1, 2, 2, 2, 2]
    _, plan = planned(tokens, edits_left_R=[left], open_R=[2], max_active_R=[2.0])
    assert plan.num_stored_R.tolist() == [1] and plan.num_committed_R.tolist() == [4]
    assert places(plan.editable_RC) == ([0, 1, 2, 3] if left else [])
    _, plan = planned(tokens, edits_R=[False], open_R=[2], max_active_R=[2.0])
    assert plan.num_stored_R.tolist() == [2]


def written(tokens: list[int], offer: list[int], words: list[list[int]]) -> list[int]:
    """The text behind a step that would take every offered token."""
    loop = Loop({"strategy": "block_diffusion", "block_length": 8, "canvas_length": 8})
    rule, slots_np = loop.sampler.features[BadWords], np.array([2])
    params = sampling(8)
    params._bad_words_token_ids = words
    loop.sampler.features.add_request(2, params)
    rule.apply_staged_writes()
    canvas = handmade.canvas(1, len(tokens), tokens=[tokens])
    numbers = torch.zeros(1, dtype=torch.int64)
    source = torch.arange(len(tokens))[None]
    plan = plan_edited_blocks(canvas, MASK)
    slots = torch.from_numpy(slots_np)
    step = Step(slots, canvas, plan, source, numbers, numbers, numbers, None)
    step.slots_np = slots_np
    rule.start_step(step)
    step.proposal = proposal(offer, [1.0] * len(offer))
    step.unmask_RC = torch.tensor([offer]) != canvas.tokens_RC
    rule.restrict(step)
    taken = torch.where(step.unmask_RC, torch.tensor([offer]), canvas.tokens_RC)
    return taken[0].tolist()


def test_an_edit_completes_no_bad_word() -> None:
    assert written([1, 2, 3, 4], [1, 2, 7, 4], [[2, 7]]) == [1, 2, 3, 4]
    assert written([1, 2, 3, 4], [6, 2, 7, 4], [[2, 8]]) == [6, 2, 7, 4]
    assert written([1, 2, MASK, 4], [1, 5, 6, 4], [[5, 6]]) == [1, 5, MASK, 4]


def test_an_edit_that_is_taken_back_brings_no_bad_word_back() -> None:
    """[5, 7] is refused; with 5 written and 2 kept the text would hold [5, 2]."""
    assert written([1, 2, 3, 4], [5, 7, 3, 4], [[5, 7], [5, 2]]) == [1, 2, 3, 4]
    tokens, offer = [1, 2, MASK, MASK], [5, 7, 8, 9]
    assert written(tokens, offer, [[5, 7], [5, 2], [2, 8]]) == [1, 2, MASK, 9]
