"""Policies: which candidates take their proposed token. Siblings with one signature.

Every policy maps ``(plan, canvas, proposal, settings)`` to a bool ``[R, C]`` subset of
``plan.candidates_RC``. Shape letters as in :mod:`dllm_plugin.decoding.plan`. Ties are broken as
higher score first, then lower position.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_plugin.decoding.blocks import at_positions, best_per_block, per_block, rank, rank_in_block
from dllm_plugin.decoding.plan import Canvas, Proposal, StepPlan


class PolicySettings(NamedTuple):
    """Per-request numbers that policies read.

    threshold_R, factor_R, eps_R float32; steps_R int32, denoising steps per block;
    block_length_R int64, positions of a whole block;
    editing_threshold_R, num_to_transfer_R float32, of :func:`joint_threshold`;
    time_schedule whether ``steps`` are Dream's time steps instead of LLaDA's transfer quota.
    """

    threshold_R: Tensor
    factor_R: Tensor
    eps_R: Tensor
    steps_R: Tensor
    block_length_R: Tensor
    editing_threshold_R: Tensor
    num_to_transfer_R: Tensor
    time_schedule: bool


Policy = Callable[[StepPlan, Canvas, Proposal, PolicySettings], Tensor]


def threshold(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Candidates whose confidence exceeds the threshold; else the best one of a full block.

    D2F's acceptance (``eval_dream.py``): the comparison is strict and always reads the
    confidence; the score only ranks the forced pick.
    """
    take_RC = plan.candidates_RC & (proposal.confidence_RC > settings.threshold_R[:, None])
    num_slots = plan.full_RS.shape[1]
    stuck_RS = plan.full_RS & (per_block(take_RC, canvas.block_RC, num_slots) == 0)
    stuck_RC = at_positions(stuck_RS, canvas.block_RC)
    forced_RC = best_per_block(
        proposal.score_RC, plan.candidates_RC & stuck_RC, canvas.block_RC, num_slots
    )
    return take_RC | forced_RC


def threshold_or_equal(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Candidates whose confidence reaches the threshold, and the best one always.

    Fast-dLLM's acceptance (``get_transfer_index`` with a threshold); the comparison is ``>=``.
    """
    ranks_RC = rank(proposal.confidence_RC, plan.candidates_RC)
    sure_RC = proposal.confidence_RC >= settings.threshold_R[:, None]
    return plan.candidates_RC & (sure_RC | (ranks_RC == 0))


def threshold_released(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """As :func:`threshold_or_equal`, among the best of what the steps have released so far.

    Dream with ``alg="confidence_threshold"`` and no cache (Fast-dLLM ``generation_utils.py``):
    each step releases an even share of the block, and what an earlier step rejected.
    """
    size_R, step_R, steps_R = canvas.size_RS[:, 0], canvas.step_R, settings.steps_R
    left_R = plan.candidates_RC.sum(dim=1)
    released_R = size_R // steps_R * (step_R + 1) + torch.minimum(step_R + 1, size_R % steps_R)
    released_R = torch.where(step_R >= steps_R - 1, size_R, released_R)
    quota_R1 = (released_R - (size_R - left_R))[:, None]
    best_RC = rank(proposal.confidence_RC, plan.candidates_RC) < quota_R1
    return threshold_or_equal(plan, canvas, proposal, settings) & best_RC


def schedule(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """The best-scored candidates, as many as the step schedule of the block says.

    Serves ``low_confidence``, ``entropy``, ``topk_margin`` and ``random``, which differ in what
    the score holds. LLaDA's quota: ``m // s`` per step and one more in the first ``m % s``
    (LLaDA ``generate.py`` ``get_num_transfer_tokens``). Dream's: ``int(left * (1 - t[i+1] /
    t[i]))`` with ``t = linspace(1, eps, steps + 1)`` in float32, all that is left in the last
    step (Dream ``generation_utils.py`` ``_sample``).
    """
    left_R = plan.candidates_RC.sum(dim=1)
    step_R, steps_R = canvas.step_R, settings.steps_R
    if settings.time_schedule:
        now_R = _time(step_R, steps_R, settings.eps_R)
        then_R = _time(step_R + 1, steps_R, settings.eps_R)
        quota_R = (left_R * (1.0 - then_R / now_R)).to(torch.int64)
    else:
        # What is left at step i already lacks the quotas of the steps before it.
        remaining_R = (steps_R - step_R).clamp_min(1)
        quota_R = (left_R + remaining_R - 1) // remaining_R
    quota_R = torch.where(step_R >= steps_R - 1, left_R, quota_R)
    return plan.candidates_RC & (rank(proposal.score_RC, plan.candidates_RC) < quota_R[:, None])


def schedule_of_block(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """As :func:`schedule`, with the quota of a whole block, however many masks it began with.

    SDAR ``block_diffusion_generate`` and LLaDA2 ``generate``; serves SDAR's static and
    sequential order, which differ in the score.
    """
    left_R = plan.candidates_RC.sum(dim=1)
    quota_R = _quota_of_block(canvas, settings)
    quota_R = torch.where(canvas.step_R >= settings.steps_R - 1, left_R, quota_R)
    return plan.candidates_RC & (rank(proposal.score_RC, plan.candidates_RC) < quota_R[:, None])


def threshold_or_quota(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Of each block the candidates above the threshold if they make up its quota, else the best.

    SDAR ``low_confidence_dynamic`` and LLaDA2.0 (``threshold``); the comparison is strict. The
    schedule is that of the first unfinished block.
    """
    is_last_R = canvas.step_R >= settings.steps_R - 1
    quota_R = _quota_of_block(canvas, settings).masked_fill(is_last_R, canvas.block_RC.shape[1])
    return _sure_or_best(plan, canvas, proposal, settings, quota_R)


def joint_threshold(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """As :func:`threshold_or_quota` with one quota for all steps, and edits.

    LLaDA2.1 ``generate`` (mask-to-token and token-to-token): beside the candidates, editable
    positions whose proposal is another token with a confidence above the editing threshold.
    """
    quota_R = settings.num_to_transfer_R.to(torch.int64)
    take_RC = _sure_or_best(plan, canvas, proposal, settings, quota_R)
    sure_RC = proposal.confidence_RC > settings.editing_threshold_R[:, None]
    return take_RC | (plan.editable_RC & sure_RC & (proposal.token_RC != canvas.tokens_RC))


def _sure_or_best(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings, quota_R: Tensor
) -> Tensor:
    """Candidates above the threshold; of blocks with fewer than their quota the best instead.

    The quota is that of the first unfinished block; of those behind it, fully activated ones have
    a quota of one and others none.
    """
    num_slots = plan.full_RS.shape[1]
    is_first_RS = plan.active_RS & (plan.active_RS.cumsum(dim=1) == 1)
    quota_RS = torch.where(is_first_RS, quota_R[:, None], plan.full_RS.to(torch.int64))
    sure_RC = plan.candidates_RC & (proposal.confidence_RC > settings.threshold_R[:, None])
    enough_RS = per_block(sure_RC, canvas.block_RC, num_slots) >= quota_RS
    ranks_RC = rank_in_block(proposal.score_RC, plan.candidates_RC, canvas.block_RC, num_slots)
    slot_RC = canvas.block_RC.clamp_max(num_slots - 1)
    best_RC = plan.candidates_RC & (ranks_RC < quota_RS.gather(1, slot_RC))
    return torch.where(enough_RS.gather(1, slot_RC), sure_RC, best_RC)


def _quota_of_block(canvas: Canvas, settings: PolicySettings) -> Tensor:
    length_R, steps_R = settings.block_length_R, settings.steps_R
    return length_R // steps_R + (canvas.step_R < length_R % steps_R).to(torch.int64)


def _time(index_R: Tensor, steps_R: Tensor, eps_R: Tensor) -> Tensor:
    """``torch.linspace(1, eps, steps + 1)[index]`` in float32, rounding as torch does."""
    stride_R = (eps_R - 1.0) / steps_R
    # torch fills the second half from the end; the truncation above sees the difference.
    from_start_R, from_end_R = 1.0 + stride_R * index_R, eps_R - stride_R * (steps_R - index_R)
    return torch.where(index_R < (steps_R + 1) // 2, from_start_R, from_end_R)


def factor(plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings) -> Tensor:
    """Fast-dLLM's factor rule over the candidates (``get_transfer_index_dynamic``).

    With confidences c[0] >= c[1] >= ... of n candidates and ``t[j] = 1 - factor / (j + 2)``,
    the first j >= 1 with ``c[j] < t[j]`` (n - 1 if none) is how many are taken; a failure at the
    last one still takes it, so one or two remaining candidates are always all taken.
    """
    left_R1 = plan.candidates_RC.sum(dim=1, keepdim=True)
    ranks_RC = rank(proposal.confidence_RC, plan.candidates_RC)
    limit_RC = 1.0 - settings.factor_R[:, None] / (ranks_RC + 2)
    fails_RC = plan.candidates_RC & (ranks_RC >= 1) & (proposal.confidence_RC < limit_RC)
    first_R1 = ranks_RC.masked_fill(~fails_RC, ranks_RC.shape[1]).amin(dim=1, keepdim=True)
    first_R1 = torch.minimum(first_R1, left_R1 - 1)
    count_R1 = first_R1 + ((first_R1 == 0) | (first_R1 == left_R1 - 1)).to(torch.int64)
    return plan.candidates_RC & (ranks_RC < count_R1)


def origin(plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings) -> Tensor:
    """Each candidate by itself, with the probability that the time schedule gives to the step.

    Dream with ``alg="origin"``: ``1 - t[i+1] / t[i]``, 1 in the last step; the score holds a
    uniform number per position.
    """
    step_R, steps_R = canvas.step_R, settings.steps_R
    now_R = _time(step_R, steps_R, settings.eps_R)
    then_R = _time(step_R + 1, steps_R, settings.eps_R)
    chance_R = torch.where(step_R >= steps_R - 1, 1.0, 1.0 - then_R / now_R)
    return plan.candidates_RC & (proposal.score_RC < chance_R[:, None])


def within_steps(rule: Policy) -> Policy:
    """The rule, but the last step of a block takes everything that is left."""

    def bounded(
        plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
    ) -> Tensor:
        is_last_R = canvas.step_R >= settings.steps_R - 1
        take_RC = rule(plan, canvas, proposal, settings)
        return take_RC | (plan.candidates_RC & is_last_R[:, None])

    return bounded


POLICIES: dict[str, Policy] = {
    "threshold": threshold,
    "low_confidence": schedule,
    "entropy": schedule,
    "topk_margin": schedule,
    "random": schedule,
    "factor": factor,
    "origin": origin,
    "sequential": schedule,
    "joint_threshold": joint_threshold,
}
# D2F always accepts by confidence; its policies only rank the forced pick.
D2F_RULES: dict[str, Policy] = dict.fromkeys(("threshold", "entropy", "topk_margin"), threshold)
FULL_ATTENTION_RULES: dict[str, Policy] = POLICIES | {
    "threshold": within_steps(threshold_or_equal),
    "factor": within_steps(factor),
}
# Dream's own loop.
TIMED_RULES: dict[str, Policy] = FULL_ATTENTION_RULES | {"threshold": threshold_released}
# Models whose blocks lie on an absolute grid.
GRID_RULES: dict[str, Policy] = {
    **dict.fromkeys(POLICIES, schedule_of_block),
    "threshold": threshold_or_quota,
    "factor": factor,
    "joint_threshold": joint_threshold,
}
