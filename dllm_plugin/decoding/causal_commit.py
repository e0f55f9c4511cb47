"""Plan blocks that a causal forward ends, and accept its tokens. Siblings with one signature.

A block is denoised bidirectionally; once it has no masks, a causal forward over its positions
stores its KV. Row i of that forward predicts position i + 1, so its last kept row yields the first
token of the next block. A step is causal exactly if its plan stores a block. Shape letters as in
:mod:`dllm_plugin.decoding.plan`.
"""

import torch
from torch import Tensor

from .block_causal import plan_block_diffusion
from .blocks import leading
from .causal_rows import Slots, one_block
from .plan import Canvas, Proposal, StepPlan, replaced
from .policies import Policy, Table, threshold_or_equal

# Self-speculation drafts all tokens at once, unless a request asks for a threshold.
DRAFTED: Table = {
    "threshold": Policy(
        threshold_or_equal,
        reads=frozenset({"threshold"}),
        defaults=(("threshold", 0.0),),
    )
}


def draft_slots(
    tokens_RC: Tensor, length_R: Tensor, num_computed_R: Tensor, mask_id: int
) -> Slots:
    """Return size and whether it is computed of the one block, and the block of each position.

    A block is what a step computes, so each step may have another length.
    """
    size_R = torch.minimum(num_computed_R, length_R)
    return one_block(tokens_RC, size_R, size_R)


def plan_causal_commit(canvas: Canvas, mask_id: int) -> StepPlan:
    """Plan one block after the other; a block without masks is stored whole."""
    plan = plan_block_diffusion(canvas, mask_id)
    end_R = canvas.size_RS[:, 0].to(torch.int64)
    return _with_rows(canvas, plan, end_R, canvas.block_RC.shape[1])


def plan_self_speculation(canvas: Canvas, mask_id: int) -> StepPlan:
    """Plan a draft of one block, then a causal forward that judges each of its tokens.

    Only the first token of a draft is final: an earlier causal forward predicted it.
    """
    plan = plan_block_diffusion(canvas, mask_id)
    return _with_rows(canvas, plan, torch.ones_like(canvas.sub_length_R), 1)


def _with_rows(canvas: Canvas, plan: StepPlan, first_R: Tensor, fixed: int) -> StepPlan:
    """Read the rows of a causal forward that predict positions from `first_R` on."""
    causal_R = plan.num_stored_R > 0
    position_C = torch.arange(canvas.block_RC.shape[1], device=first_R.device)
    inside_RC = position_C <= canvas.size_RS[:, :1]
    inside_RC &= position_C >= first_R[:, None]
    return replaced(
        plan,
        editable_RC=inside_RC & causal_R[:, None],
        fixed_R=torch.full_like(plan.fixed_R, fixed),
    )


def accept_block(
    canvas: Canvas,
    plan: StepPlan,
    unmask_RC: Tensor,
    proposal: Proposal,
    mask_id: int,
) -> tuple[Canvas, StepPlan, Tensor]:
    """Keep a stored block, and unmask the first token of the next block."""
    return _with_next(canvas, plan), plan, unmask_RC | plan.editable_RC


def _with_next(canvas: Canvas, plan: StepPlan) -> Canvas:
    """Count what causal rows predict to the block: the first token after it may end the text."""
    block_RC = canvas.block_RC.masked_fill(plan.editable_RC, 0)
    return canvas._replace(block_RC=block_RC)


def accept_prefix(
    canvas: Canvas,
    plan: StepPlan,
    unmask_RC: Tensor,
    proposal: Proposal,
    mask_id: int,
) -> tuple[Canvas, StepPlan, Tensor]:
    """Keep the draft up to the first token that the causal forward predicts otherwise.

    What it predicts there is the first token of the next block. Later drafts are dropped.
    """
    causal_R = plan.num_stored_R > 0
    position_C = torch.arange(canvas.block_RC.shape[1], device=causal_R.device)
    agrees_RC = (proposal.token_RC == canvas.tokens_RC) | (position_C == 0)
    kept_R = leading(agrees_RC & (position_C < canvas.size_RS[:, :1]))
    kept_RC = position_C <= kept_R[:, None]
    taken_RC = plan.editable_RC & kept_RC
    tokens_RC = canvas.tokens_RC.masked_fill(causal_R[:, None] & ~kept_RC, mask_id)
    kept_R = kept_R.where(causal_R, 0)
    plan = replaced(
        plan,
        num_committed_R=kept_R.to(torch.int32),
        fixed_R=torch.where(causal_R, kept_R + 1, plan.fixed_R),
    )
    unmask_RC = torch.where(causal_R[:, None], taken_RC, unmask_RC)
    canvas = _with_next(canvas, plan)._replace(tokens_RC=tokens_RC)
    return canvas, plan, unmask_RC
