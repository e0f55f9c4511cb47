"""Choose which candidates take their proposed token. Siblings with one signature.

Every rule maps ``(plan, canvas, proposal, settings)`` to a bool ``[R, C]`` subset of
``plan.candidates_RC``. Shape letters as in :mod:`dllm_plugin.decoding.plan`. Ties are broken as
higher score first, then lower position.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import per_block, rank, rank_in_block
from .plan import Canvas, Proposal, StepPlan
from .quotas import dream_time, rounded_quota, step_with_quota


class PolicySettings(NamedTuple):
    """List the numbers that policies read, one per request.

    steps_R int32, denoising steps per block; block_length_R int64; others float32.
    """

    threshold_R: Tensor
    factor_R: Tensor
    eps_R: Tensor
    steps_R: Tensor
    block_length_R: Tensor
    entropy_threshold_R: Tensor | None
    position_penalty_R: Tensor | None
    editing_threshold_R: Tensor
    num_to_transfer_R: Tensor


Rule = Callable[[StepPlan, Canvas, Proposal, PolicySettings], Tensor]


def threshold(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take candidates whose confidence exceeds the threshold; else the best of a full block.

    D2F's acceptance (``eval_dream.py``): the comparison is strict and always reads the
    confidence; the score only ranks the forced pick.
    """
    quota_RS = plan.full_RS.to(torch.int64)
    return _sure_or_best(plan, canvas, proposal, settings, quota_RS)


def threshold_or_equal(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take candidates whose confidence reaches the threshold, and the best one always.

    Fast-dLLM's acceptance (``get_transfer_index`` with a threshold); the comparison is ``>=``.
    """
    ranks_RC = rank(proposal.confidence_RC, plan.candidates_RC)
    sure_RC = proposal.confidence_RC >= settings.threshold_R[:, None]
    return plan.candidates_RC & (sure_RC | (ranks_RC == 0))


def threshold_released(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take as :func:`threshold_or_equal`, among the best of what the steps released so far.

    Dream with ``alg="confidence_threshold"`` and no cache (Fast-dLLM ``generation_utils.py``):
    each step releases an even share of the block, and what an earlier step rejected.
    """
    size_R = canvas.size_RS[:, 0]
    step_R = canvas.step_R
    steps_R = settings.steps_R
    left_R = plan.candidates_RC.sum(dim=1)
    released_R = size_R // steps_R * (step_R + 1) + torch.minimum(
        step_R + 1, size_R % steps_R
    )
    released_R = torch.where(step_R >= steps_R - 1, size_R, released_R)
    quota_R1 = (released_R - (size_R - left_R))[:, None]
    best_RC = rank(proposal.confidence_RC, plan.candidates_RC) < quota_R1
    return threshold_or_equal(plan, canvas, proposal, settings) & best_RC


def schedule(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take the best-scored candidates by LLaDA's quota of the step.

    ``m // s`` per step and one more in the first ``m % s`` (LLaDA ``generate.py``
    ``get_num_transfer_tokens``), all that is left in the last step.
    """
    left_R = plan.candidates_RC.sum(dim=1)
    # What is left at step i already lacks the quotas of the steps before it.
    remaining_R = (settings.steps_R - canvas.step_R).clamp_min(1)
    quota_R = (left_R + remaining_R - 1) // remaining_R
    return _best_until_the_last_step(plan, canvas, proposal, settings, quota_R)


def time_schedule(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take the best-scored candidates by Dream's time schedule.

    ``int(left * (1 - t[i+1] / t[i]))`` with ``t = linspace(1, eps, steps + 1)`` in float32, all
    that is left in the last step (Dream ``generation_utils.py`` ``_sample``).
    """
    left_R = plan.candidates_RC.sum(dim=1)
    now_R = dream_time(canvas.step_R, settings.steps_R, settings.eps_R)
    then_R = dream_time(canvas.step_R + 1, settings.steps_R, settings.eps_R)
    quota_R = (left_R * (1.0 - then_R / now_R)).to(torch.int64)
    return _best_until_the_last_step(plan, canvas, proposal, settings, quota_R)


def kept_schedule(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Keep the worst ``int(total * (left_steps / steps))`` masked, in float32 (RND1)."""
    rest_R = (settings.steps_R - 1 - canvas.step_R).double()
    share_R = (rest_R / settings.steps_R).float()
    quota_R = plan.candidates_RC.sum(dim=1) - (canvas.size_RS[:, 0] * share_R).long()
    return _best_until_the_last_step(plan, canvas, proposal, settings, quota_R)


def block_schedule(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take the best-scored candidates by the quota of a whole block, whatever it began with.

    SDAR ``block_diffusion_generate`` and LLaDA2 ``generate``; serves SDAR's static and
    sequential order, which differ in the score.
    """
    quota_R = _quota_of_block(canvas, settings)
    return _best_until_the_last_step(plan, canvas, proposal, settings, quota_R)


def rounded_schedule(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take the best-scored by a rounded share of what is left (dLLM), but for steps without."""
    left_R = plan.candidates_RC.sum(dim=1)
    steps_R = settings.steps_R
    step_R = step_with_quota(canvas.step_R, left_R, steps_R)
    quota_R1 = rounded_quota(step_R, left_R, steps_R)[:, None]
    return plan.candidates_RC & (rank(proposal.score_RC, plan.candidates_RC) < quota_R1)


def _best_until_the_last_step(
    plan: StepPlan,
    canvas: Canvas,
    proposal: Proposal,
    settings: PolicySettings,
    quota_R: Tensor,
) -> Tensor:
    """Take the best-scored candidates of a quota; the last step of a block takes all."""
    is_last_R = canvas.step_R >= settings.steps_R - 1
    quota_R = torch.where(is_last_R, plan.candidates_RC.sum(dim=1), quota_R)
    return plan.candidates_RC & (
        rank(proposal.score_RC, plan.candidates_RC) < quota_R[:, None]
    )


def threshold_or_quota(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take the candidates above the threshold if they make up the block's quota, else the best.

    SDAR ``low_confidence_dynamic`` and LLaDA2.0 (``threshold``); the comparison is strict. The
    schedule is that of the first unfinished block.
    """
    is_last_R = canvas.step_R >= settings.steps_R - 1
    quota_R = _quota_of_block(canvas, settings).masked_fill(
        is_last_R, canvas.block_RC.shape[1]
    )
    quota_RS = _quotas(plan, quota_R)
    return _sure_or_best(plan, canvas, proposal, settings, quota_RS)


def joint_threshold(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take as :func:`threshold_or_quota` with one quota for all steps, and edit.

    LLaDA2.1 ``generate`` (mask-to-token and token-to-token): it also takes editable
    positions whose proposal is another token with a confidence above the editing threshold.
    """
    quota_RS = _quotas(plan, settings.num_to_transfer_R.to(torch.int64))
    take_RC = _sure_or_best(plan, canvas, proposal, settings, quota_RS)
    sure_RC = proposal.confidence_RC > settings.editing_threshold_R[:, None]
    return take_RC | (
        plan.editable_RC & sure_RC & (proposal.token_RC != canvas.tokens_RC)
    )


def _quotas(plan: StepPlan, quota_R: Tensor) -> Tensor:
    """Return the quota of each block, given that of the first unfinished one.

    Of later blocks, fully activated blocks have a quota of one and others none.
    """
    is_first_RS = plan.active_RS & (plan.active_RS.cumsum(dim=1) == 1)
    return torch.where(is_first_RS, quota_R[:, None], plan.full_RS.to(torch.int64))


def _sure_or_best(
    plan: StepPlan,
    canvas: Canvas,
    proposal: Proposal,
    settings: PolicySettings,
    quota_RS: Tensor,
) -> Tensor:
    """Take candidates above the threshold; of blocks with fewer than their quota the best."""
    num_slots = plan.full_RS.shape[1]
    sure_RC = plan.candidates_RC & (
        proposal.confidence_RC > settings.threshold_R[:, None]
    )
    enough_RS = per_block(sure_RC, canvas.block_RC, num_slots) >= quota_RS
    ranks_RC = rank_in_block(
        proposal.score_RC, plan.candidates_RC, canvas.block_RC, num_slots
    )
    slot_RC = canvas.block_RC.clamp_max(num_slots - 1)
    best_RC = plan.candidates_RC & (ranks_RC < quota_RS.gather(1, slot_RC))
    return torch.where(enough_RS.gather(1, slot_RC), sure_RC, best_RC)


def _quota_of_block(canvas: Canvas, settings: PolicySettings) -> Tensor:
    """Return LLaDA's quota of this step for a whole block."""
    length_R = settings.block_length_R
    steps_R = settings.steps_R
    return length_R // steps_R + (canvas.step_R < length_R % steps_R).to(torch.int64)


def factor(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take candidates by Fast-dLLM's factor rule (``get_transfer_index_dynamic``).

    With confidences c[0] >= c[1] >= ... of n candidates and ``t[j] = 1 - factor / (j + 2)``,
    the first j >= 1 with ``c[j] < t[j]`` (n - 1 if none) is how many are taken; a failure at the
    last one still takes it, so one or two remaining candidates are always all taken.
    """
    left_R1 = plan.candidates_RC.sum(dim=1, keepdim=True)
    ranks_RC = rank(proposal.confidence_RC, plan.candidates_RC)
    limit_RC = 1.0 - settings.factor_R[:, None] / (ranks_RC + 2)
    fails_RC = (
        plan.candidates_RC & (ranks_RC >= 1) & (proposal.confidence_RC < limit_RC)
    )
    first_R1 = ranks_RC.masked_fill(~fails_RC, ranks_RC.shape[1]).amin(
        dim=1, keepdim=True
    )
    first_R1 = torch.minimum(first_R1, left_R1 - 1)
    count_R1 = first_R1 + ((first_R1 == 0) | (first_R1 == left_R1 - 1)).to(torch.int64)
    return plan.candidates_RC & (ranks_RC < count_R1)


def origin(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take each candidate with the probability that the time schedule gives to the step.

    Dream with ``alg="origin"``: ``1 - t[i+1] / t[i]``, 1 in the last step; the score holds a
    uniform number per position.
    """
    step_R, steps_R = canvas.step_R, settings.steps_R
    now_R = dream_time(step_R, steps_R, settings.eps_R)
    then_R = dream_time(step_R + 1, steps_R, settings.eps_R)
    chance_R = torch.where(step_R >= steps_R - 1, 1.0, 1.0 - then_R / now_R)
    return plan.candidates_RC & (proposal.score_RC < chance_R[:, None])


def within_steps(rule: Rule) -> Rule:
    """Return the rule, but with a last step of a block that takes everything that is left."""

    def bounded(
        plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
    ) -> Tensor:
        is_last_R = canvas.step_R >= settings.steps_R - 1
        take_RC = rule(plan, canvas, proposal, settings)
        return take_RC | (plan.candidates_RC & is_last_R[:, None])

    return bounded


class Policy(NamedTuple):
    """Describe one policy under one strategy.

    rule       which candidates take their proposal
    ranks_by   the score: confidence, entropy, margin, position, random or uniform
    reads      options of a request that change its picks
    defaults   options that are not the family's or the block's own by default
    takes_rest whether the last of a block's steps takes all that is left
    """

    rule: Rule
    ranks_by: str = "confidence"
    reads: frozenset[str] = frozenset()
    defaults: tuple[tuple[str, float], ...] = ()
    takes_rest: bool = True

    def default(self, name: str, otherwise: Any) -> Any:
        """Return the policy's own default of an option."""
        return dict(self.defaults).get(name, otherwise)


OF_ENTROPIES = frozenset({"steps", "entropy_temperature"})
# Numbers of the policies that let several blocks be denoised at once.
SEVERAL_BLOCKS = ("max_active_blocks", "block_add_threshold", "decoded_token_threshold")
OF_EDITS = ("threshold", "editing_threshold", "max_post_steps", "num_to_transfer")
# Policies of one schedule, by what they rank by.
RANKINGS = {
    "low_confidence": "confidence",
    "entropy": "entropy",
    "topk_margin": "margin",
    "random": "random",
}
# Those whose choice `alg_temp` may draw.
SAMPLED = ("low_confidence", "entropy", "topk_margin")
Table = dict[str, Policy]


def _by_schedule(rule: Rule, *reads: str, sampled: tuple[str, ...] = ()) -> Table:
    """Return one schedule under every ranking; `sampled` is read by those that can sample."""
    return {
        name: Policy(
            rule, ranks_by, frozenset(reads + (sampled if name in SAMPLED else ()))
        )
        for name, ranks_by in RANKINGS.items()
    }


def _reading(rule: Rule, *reads: str) -> Policy:
    return Policy(rule, reads=frozenset(reads))


# Block diffusion after a prompt: LLaDA's quota, or Dream's time.
PROMPT_BLOCKS: Table = {
    "threshold": _reading(threshold, "threshold", *SEVERAL_BLOCKS),
    "factor": _reading(factor, "factor"),
    **_by_schedule(schedule, "steps"),
}
PROMPT_BLOCKS_IN_TIME: Table = PROMPT_BLOCKS | _by_schedule(
    time_schedule, "steps", "eps"
)
# Block diffusion on an absolute grid.
GRID_BLOCKS: Table = {
    "threshold": _reading(threshold_or_quota, "threshold", "steps", *SEVERAL_BLOCKS),
    "factor": _reading(factor, "factor"),
    **_by_schedule(block_schedule, "steps"),
    "sequential": Policy(block_schedule, "position", frozenset({"steps"})),
}
EDITED_BLOCKS: Table = GRID_BLOCKS | {
    "joint_threshold": Policy(
        joint_threshold,
        reads=frozenset({*OF_EDITS, *SEVERAL_BLOCKS}),
        # LLaDA2.1's quality mode.
        defaults=(("threshold", 0.7), ("editing_threshold", 0.5)),
    )
}
# D2F always accepts by confidence; its policies only rank the forced pick.
D2F: Table = {
    name: Policy(threshold, ranks_by, frozenset({"threshold", *SEVERAL_BLOCKS}))
    for name, ranks_by in (
        ("threshold", "confidence"),
        ("entropy", "entropy"),
        ("topk_margin", "margin"),
    )
}
# Floating canvases: their window has no number of steps.
FLOATING: Table = {"threshold": _reading(threshold, "threshold")}
# By what a block has left: of its only active block, whose last step takes everything.
OF_LEFT: Table = {
    "threshold": _reading(within_steps(threshold_or_equal), "threshold"),
    "factor": _reading(within_steps(factor), "factor"),
    **_by_schedule(schedule, "steps"),
}
OF_LEFT_ROUNDED: Table = OF_LEFT | _by_schedule(rounded_schedule, "steps")
OF_LEFT_IN_TIME: Table = OF_LEFT | _by_schedule(
    time_schedule, "steps", "eps", sampled=("alg_temp",)
)
# Dream's own loop, the only loop that samples which positions to unmask. By threshold it releases
# positions step by step; one step releases all at once.
DREAM_LOOP: Table = OF_LEFT_IN_TIME | {
    "threshold": Policy(
        threshold_released,
        reads=frozenset({"threshold"}),
        defaults=(("steps", 1),),
        takes_rest=False,
    ),
    "origin": Policy(origin, "uniform", frozenset({"steps", "eps"})),
}
RND1_LOOP: Table = {"entropy": Policy(kept_schedule, "entropy", OF_ENTROPIES)}
TABLES = (PROMPT_BLOCKS, DREAM_LOOP, GRID_BLOCKS, EDITED_BLOCKS, D2F, OF_LEFT)
RANKED_BY = {
    name: policy.ranks_by for table in TABLES for name, policy in table.items()
}
