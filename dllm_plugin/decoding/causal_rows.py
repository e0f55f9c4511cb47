"""Plan strides (I-DLM) and windows (WeDLM): strategies whose attention is causal by rows.

Introspective strides: row i predicts position i + 1. A canvas begins with the pending token, which
is final; drafts may follow it, then masks. A step computes ``2 N - 1`` positions, and its rows
propose a token for every position after the first. A draft is accepted if the proposal is the same
token. The proposal after the accepted drafts becomes the next pending token. If all drafts were
accepted, the proposals of the masks after them are the next drafts; otherwise all that follows is
masked again. A token is sampled by random numbers of its position only, so that a draft and the
row that judges it share them: a text is that of causal decoding, whatever was drafted, at any
temperature, and drafts change the number of forwards.

Causal windows: attention is causal in the order of the rows of a forward. Decided positions come
first, then masks, both in ascending order. Leading decided positions therefore lie in their own
slots and see only what is before them: a forward makes their KV final and commits them. The window
moves on by as many masks. A canvas holds two windows, since at most a whole window commits.

Torch only; shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

import torch
from torch import Tensor

from .block_causal import without_edits
from .blocks import leading, rank
from .plan import Canvas, Proposal, StepPlan, replaced
from .policies import Policy, PolicySettings, Table

Slots = tuple[Tensor, Tensor, Tensor]


def rows_of_stride(block_length: int) -> int:
    """Return how many positions of a canvas a step of a stride computes."""
    return 2 * block_length - 1


def rows_of_window(window: int) -> int:
    """Return how many positions of a canvas a step of a window computes."""
    return 2 * window


def stride_slots(
    tokens_RC: Tensor, length_R: Tensor, num_computed_R: Tensor, mask_id: int
) -> Slots:
    """Return size and whether it is computed of the one block, and the block of each position.

    The block holds what is computed, and the position after it.
    """
    return one_block(tokens_RC, num_computed_R, num_computed_R + 1)


def window_slots(
    tokens_RC: Tensor, length_R: Tensor, num_computed_R: Tensor, mask_id: int
) -> Slots:
    """Return size and whether it is computed of the one block, and the block of each position.

    The block is the window, with what commits before it.
    """
    stop_R = torch.minimum(leading(tokens_RC != mask_id) + length_R, num_computed_R)
    return one_block(tokens_RC, stop_R, stop_R)


def one_block(tokens_RC: Tensor, size_R: Tensor, stop_R: Tensor) -> Slots:
    """Return the slots of a block that all positions before a stop belong to."""
    position_C = torch.arange(tokens_RC.shape[1], device=tokens_RC.device)
    size_RS = size_R.to(torch.int32)[:, None]
    return size_RS, size_RS > 0, (position_C >= stop_R[:, None]).to(torch.int64)


def plan_stride(canvas: Canvas, mask_id: int) -> StepPlan:
    """Plan a proposal for every position that a row predicts."""
    position_C = torch.arange(canvas.block_RC.shape[1], device=canvas.block_RC.device)
    return _plan(canvas, position_C > 0, torch.zeros_like(canvas.open_R))


def plan_window(canvas: Canvas, mask_id: int) -> StepPlan:
    """Plan the masks of the window; what earlier steps decided at its start commits."""
    masked_RC = canvas.tokens_RC == mask_id
    decided_R = leading(~masked_RC)
    plan = _plan(canvas, masked_RC, decided_R.to(torch.int32))
    # A token that this step decides commits in the next step, as in the authors' engine.
    return replaced(plan, fixed_R=decided_R)


def _plan(canvas: Canvas, wanted_RC: Tensor, num_committed_R: Tensor) -> StepPlan:
    """Plan wanted positions of the one block; only a request in flight after its end has none."""
    active_RS = ~canvas.ended_R[:, None]
    return without_edits(
        canvas,
        open_R=torch.ones_like(canvas.open_R),
        active_RS=active_RS,
        full_RS=canvas.full_RS,
        candidates_RC=(canvas.block_RC == 0) & wanted_RC & active_RS,
        num_stored_R=torch.zeros_like(canvas.block_RC[:, 0]),
        num_committed_R=num_committed_R,
    )


def accept_stride(
    canvas: Canvas,
    plan: StepPlan,
    unmask_RC: Tensor,
    proposal: Proposal,
    mask_id: int,
) -> tuple[Canvas, StepPlan, Tensor]:
    """Keep the pending token and the leading drafts that are proposed again, and draft further.

    The proposal after them is final, too: it is pending in the next step.
    """
    position_C = torch.arange(canvas.block_RC.shape[1], device=unmask_RC.device)
    computed_R = canvas.size_RS[:, 0].to(torch.int64)
    drafted_R = leading(canvas.tokens_RC != mask_id)
    same_RC = (proposal.token_RC == canvas.tokens_RC) | (position_C == 0)
    same_RC &= position_C < torch.minimum(drafted_R, computed_R)[:, None]
    kept_R = leading(same_RC)
    stride_R = torch.where(kept_R == drafted_R, (computed_R + 1) // 2, 1)
    decided_RC = position_C < (kept_R + stride_R)[:, None]
    plan = replaced(plan, num_committed_R=kept_R.to(torch.int32), fixed_R=kept_R + 1)
    tokens_RC = canvas.tokens_RC.masked_fill(~decided_RC, mask_id)
    return canvas._replace(tokens_RC=tokens_RC), plan, unmask_RC & decided_RC


def row_of_position(tokens_RC: Tensor, mask_id: int) -> Tensor:
    """Return which row of a window's forward each canvas position is, int64 ``[R, C]``."""
    masked_RC = tokens_RC == mask_id
    decided_RC = ~masked_RC
    up_to_RC = decided_RC.sum(dim=1, keepdim=True) + masked_RC.cumsum(dim=1)
    return torch.where(masked_RC, up_to_RC, decided_RC.cumsum(dim=1)) - 1


def position_of_row(tokens_RC: Tensor, mask_id: int) -> Tensor:
    """Return which canvas position each row of a window's forward is, int64 ``[R, C]``."""
    row_RC = row_of_position(tokens_RC, mask_id)
    position_C = torch.arange(tokens_RC.shape[1], device=tokens_RC.device)
    return torch.empty_like(row_RC).scatter_(1, row_RC, position_C.expand_as(row_RC))


def every(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take every candidate."""
    return plan.candidates_RC


def low_entropy(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take candidates whose entropy with a penalty is below the threshold; if none, the best one.

    WeDLM's engine: the penalty grows with the distance to the first candidate, and the comparison
    is strict.
    """
    assert settings.entropy_threshold_R is not None
    assert settings.position_penalty_R is not None
    position_C = torch.arange(canvas.block_RC.shape[1], device=canvas.block_RC.device)
    distance_RC = position_C - leading(~plan.candidates_RC)[:, None]
    penalty_RC = settings.position_penalty_R[:, None] * distance_RC
    score_RC = proposal.score_RC - penalty_RC
    sure_RC = -score_RC < settings.entropy_threshold_R[:, None]
    best_RC = rank(score_RC, plan.candidates_RC) == 0
    none_R1 = ~(plan.candidates_RC & sure_RC).any(dim=1, keepdim=True)
    return plan.candidates_RC & (sure_RC | (best_RC & none_R1))


WINDOW: Table = {
    "entropy": Policy(
        low_entropy, "entropy", frozenset({"entropy_threshold", "position_penalty"})
    )
}
IN_ORDER: Table = {"sequential": Policy(every, "position")}
