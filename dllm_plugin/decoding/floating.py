"""Plan floating canvases: what is decided commits at once, and a window of masks follows it.

A step computes the first positions of every canvas, as many as the scheduler chose. Of them the
leading decided ones, the *run*, commit: they see what was committed and themselves, so their KV is
final. After the run lies a *window* of masks, after which nothing exists. Block slot 0 is the run,
the slots after it divide the window. Shape letters as in
:mod:`dllm_plugin.decoding.plan`.
"""

import torch
from torch import Tensor

from .block_causal import without_edits
from .blocks import per_block
from .plan import Canvas, StepPlan


def plan_floating(canvas: Canvas, mask_id: int) -> StepPlan:
    """Plan the run to commit and the masks of the window, of which one at least is unmasked."""
    num_slots = canvas.size_RS.shape[1]
    slot_S = torch.arange(num_slots, device=canvas.open_R.device)
    run_R = canvas.size_RS[:, 0]
    in_window_RC = (canvas.block_RC > 0) & (canvas.block_RC < num_slots)
    candidates_RC = (canvas.tokens_RC == mask_id) & in_window_RC
    active_RS = per_block(candidates_RC, canvas.block_RC, num_slots) > 0
    return without_edits(
        canvas,
        # What was decided stays decided: a text is final also if this step computes less of it.
        open_R=torch.full_like(canvas.open_R, num_slots + 1),
        active_RS=active_RS,
        full_RS=(slot_S == 1).expand_as(active_RS),
        candidates_RC=candidates_RC,
        num_stored_R=(run_R > 0).to(torch.int64),
        num_committed_R=run_R,
    )


def block_slots(
    run_R: Tensor,
    first_R: Tensor,
    limit_R: Tensor,
    computed_R: Tensor,
    length: int,
    num_slots: int,
    shift: int,
    num_positions: int,
) -> Tensor:
    """Return the block slot of each canvas position, int64 ``[R, C]``; S if there is none.

    The window reaches one position further if row i predicts position i + 1. In the narrowest
    window of all it is only the first mask: such texts are decoded from left to right.

    Args:
        first_R: the first mask.
        limit_R: where a window ends at most.
        computed_R: positions that the forward computes.
    """
    position_C = torch.arange(num_positions, device=run_R.device)
    stop_R = torch.minimum(computed_R + shift, limit_R)
    narrow_R = torch.minimum(stop_R, first_R + 1)
    stop_R = torch.where(computed_R <= 2 - shift, narrow_R, stop_R)
    part_RC = (position_C - run_R[:, None]) // length
    slot_RC = (part_RC + 1).clamp(0, num_slots - 1)
    exists_RC = position_C < torch.maximum(stop_R, run_R)[:, None]
    return torch.where(exists_RC, slot_RC, num_slots)
