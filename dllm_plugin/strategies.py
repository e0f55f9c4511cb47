"""Strategies: what a step computes and when a block commits. Siblings with one signature.

``plan_*`` reads the state before the forward, :func:`settle` writes the outcome after it; both
are batched over the requests of the step and stay on the device. Shape letters as in
:mod:`dllm_plugin.plan`. Definitions: D2F paper (arXiv 2508.09192) and its reference code
(``eval_dream.py``, ``eval_llada.py``), restated with their traps in ``docs/strategies.md``.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.kernels.reference import at_positions, leading, per_block
from dllm_plugin.plan import Canvas, StepOutcome, StepPlan


def canvas_segments(num_fed_R: np.ndarray, length_R: np.ndarray, max_blocks: int) -> np.ndarray:
    """Stops of the query segments of a block-causal canvas: int ``[R, max_blocks + 1]``.

    Segment i is ``[stop[i - 1], stop[i])`` relative to the canvas start and sees every key up to
    its own stop. What lies behind `max_blocks` blocks can hold no open block and rides along as
    the last segment; segments may be empty.
    """
    stops = np.arange(1, max_blocks + 2) * length_R[:, None]
    stops[:, -1] = num_fed_R
    return np.minimum(stops, num_fed_R[:, None])


def prefill_segments(
    prompt_len_R: np.ndarray, end_R: np.ndarray, length_R: np.ndarray
) -> np.ndarray:
    """Stops of the query segments of a prefill ``[0, end)``: int ``[R, K + 1]``.

    The prompt is one bidirectional block; what a resumed request had committed follows block by
    block, so that its KV is what it was before preemption.
    """
    most = int((np.maximum(end_R - prompt_len_R, 0) // length_R).max(initial=0)) + 1
    stops = prompt_len_R[:, None] + np.arange(most + 1) * length_R[:, None]
    return np.minimum(stops, end_R[:, None])


def plan_d2f(canvas: Canvas, mask_id: int) -> StepPlan:
    """Discrete diffusion forcing: several blocks are denoised at once (paper, algorithm 2).

    At most one block is opened per step, when the last one is decided far enough; a block whose
    predecessor is decided far enough is fully activated for good; ratios compare with ``>=``.
    """
    return _plan_blocks(
        canvas, mask_id, canvas.block_add_threshold_R, canvas.decoded_token_threshold_R
    )


def plan_block_diffusion(canvas: Canvas, mask_id: int) -> StepPlan:
    """One block after the other; a finished block commits while the next one is denoised.

    Feeding the finished block and the first step of its successor in one pass is exact: keys of
    the finished block do not depend on later positions.
    """
    ones_R = torch.ones_like(canvas.block_add_threshold_R)
    return _plan_blocks(canvas, mask_id, ones_R, ones_R)


def _plan_blocks(
    canvas: Canvas, mask_id: int, add_threshold_R: Tensor, decoded_threshold_R: Tensor
) -> StepPlan:
    num_slots = canvas.size_RS.shape[1]
    slot_S = torch.arange(num_slots, device=canvas.open_R.device)
    masked_RC = canvas.tokens_RC == mask_id
    left_RS = per_block(masked_RC, canvas.block_RC, num_slots)
    # The reference divides too, so equality with a threshold means the same here.
    done_RS = (canvas.size_RS - left_RS) / canvas.size_RS.clamp_min(1)
    predecessor_RS = torch.nn.functional.pad(done_RS[:, :-1], (1, 0), value=1.0)

    add_RS = (slot_S == canvas.open_R[:, None]) & (canvas.size_RS > 0) & canvas.fed_RS
    add_RS &= predecessor_RS >= add_threshold_R[:, None]
    add_RS &= ~canvas.saw_stop_R[:, None]
    open_R = canvas.open_R + add_RS.sum(dim=1, dtype=torch.int32)
    open_RS = slot_S < open_R[:, None]
    # A step that could not feed every open block decides nothing: their rows would be wrong.
    whole_R1 = (canvas.fed_RS | ~open_RS).all(dim=1, keepdim=True)

    full_RS = canvas.full_RS | (predecessor_RS >= decoded_threshold_R[:, None])
    finished_RS = open_RS & (left_RS == 0) & whole_R1
    stored_RS = slot_S < leading(finished_RS)[:, None]
    active_RS = open_RS & (left_RS > 0) & whole_R1
    return StepPlan(
        open_R=open_R,
        active_RS=active_RS,
        full_RS=full_RS & open_RS,
        candidates_RC=masked_RC & at_positions(active_RS, canvas.block_RC),
        num_stored_R=stored_RS.sum(dim=1),
        num_committed_R=(canvas.size_RS * stored_RS).sum(dim=1, dtype=torch.int32),
    )


def settle(
    canvas: Canvas,
    plan: StepPlan,
    unmask_RC: Tensor,
    tokens_RC: Tensor,
    is_stop_RC: Tensor,
    remaining_R: Tensor,
    mask_id: int,
) -> StepOutcome:
    """Commit finished blocks, or end the request as soon as its text is final.

    A written token never changes, so a leading run of decided tokens that holds a stop token
    (or all the tokens asked for) is the final text: it is emitted at once, up to and including
    the stop token, although the KV of its last block was never stored (exact early
    exit).

    Args:
        tokens_RC: the canvas after `unmask_RC` was applied.
        is_stop_RC: positions whose token ends the request.
        remaining_R: int32, tokens the request may still emit.
    """
    position_C = torch.arange(tokens_RC.shape[1], device=tokens_RC.device)
    open_RC = canvas.block_RC < plan.open_R[:, None]
    run_R = leading(open_RC & (tokens_RC != mask_id))
    stop_RC = is_stop_RC & (position_C < run_R[:, None])
    first_stop_R = torch.where(stop_RC, position_C, tokens_RC.shape[1]).amin(dim=1)
    final_R = torch.minimum(first_stop_R + 1, remaining_R)
    ends_R = run_R >= final_R
    num_committed_R = torch.where(ends_R, final_R, plan.num_committed_R)
    return StepOutcome(
        unmask_RC,
        num_committed_R.masked_fill(canvas.ended_R, 0).to(torch.int32),
        plan.num_committed_R.masked_fill(canvas.ended_R, 0),
        canvas.ended_R | ends_R,
    )


PlanFunction = Callable[[Canvas, int], StepPlan]

STRATEGIES: dict[str, PlanFunction] = {
    "d2f": plan_d2f,
    "block_diffusion": plan_block_diffusion,
}
