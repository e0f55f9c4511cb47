"""Strategies: what a step computes and when a block commits. Siblings with one signature.

``plan_*`` reads the state before the forward, ``settle_*`` writes the outcome after it; both
are batched over the requests of the step and stay on the device. ``span_*`` say on the host what
the next forward of a full-attention request computes. Shape letters as in
:mod:`dllm_plugin.plan`. Definitions: D2F paper (arXiv 2508.09192) and its reference code
(``eval_dream.py``, ``eval_llada.py``); LLaDA ``generate.py``, Dream ``generation_utils.py`` and
Fast-dLLM (arXiv 2505.22618) ``generate.py``, ``generation_utils_block.py``; restated with their
traps in ``docs/strategies.md``.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.kernels.reference import at_positions, leading, per_block
from dllm_plugin.plan import Canvas, StepOutcome, StepPlan, replaced


def canvas_segments(num_fed_R: np.ndarray, length_R: np.ndarray, max_blocks: int) -> np.ndarray:
    """Stops of the query segments of a block-causal canvas: int ``[R, max_blocks + 1]``.

    Segment i is ``[stop[i - 1], stop[i])`` relative to the canvas start and sees every key up to
    its own stop. What lies behind `max_blocks` blocks can hold no open block and rides along as
    the last segment; segments may be empty.
    """
    stops = np.arange(1, max_blocks + 2) * length_R[:, None]
    stops[:, -1] = num_fed_R
    return np.minimum(stops, num_fed_R[:, None])


def prefill_segments(origin_R: np.ndarray, end_R: np.ndarray, length_R: np.ndarray) -> np.ndarray:
    """Stops of the query segments of a prefill ``[0, end)``: int ``[R, K + 1]``.

    What lies before the origin of the block grid, which is the prompt or nothing, is one
    bidirectional block; the rest follows block by block, so that the KV of a resumed request is
    what it was before preemption.
    """
    most = int((np.maximum(end_R - origin_R, 0) // length_R).max(initial=0)) + 1
    stops = origin_R[:, None] + np.arange(most + 1) * length_R[:, None]
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
    the finished block do not depend on later positions. Where more than one block may be active,
    blocks are opened and activated as in D2F.
    """
    one_R = canvas.max_active_R == 1
    return _plan_blocks(
        canvas,
        mask_id,
        canvas.block_add_threshold_R.masked_fill(one_R, 1.0),
        canvas.decoded_token_threshold_R.masked_fill(one_R, 1.0),
        canvas.max_active_R,
    )


def plan_edited_blocks(canvas: Canvas, mask_id: int) -> StepPlan:
    """As :func:`plan_block_diffusion`, and tokens of the first block may be replaced (LLaDA2.1)."""
    return _allow_edits(canvas, plan_block_diffusion(canvas, mask_id), mask_id)


def plan_sub_blocks(canvas: Canvas, mask_id: int) -> StepPlan:
    """As :func:`plan_block_diffusion`, sub-block after sub-block (Fast-dLLM v2)."""
    return _first_sub_blocks(canvas, plan_block_diffusion(canvas, mask_id))


def _plan_blocks(
    canvas: Canvas,
    mask_id: int,
    add_threshold_R: Tensor,
    decoded_threshold_R: Tensor,
    max_active_R: Tensor | None = None,
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
    if max_active_R is not None:
        active_R = ((slot_S < canvas.open_R[:, None]) & (left_RS > 0)).sum(dim=1)
        add_RS &= (active_R < max_active_R)[:, None]
    open_R = canvas.open_R + add_RS.sum(dim=1, dtype=torch.int32)
    open_RS = slot_S < open_R[:, None]
    # A step that could not feed every open block decides nothing: their rows would be wrong.
    whole_R1 = (canvas.fed_RS | ~open_RS).all(dim=1, keepdim=True)

    full_RS = canvas.full_RS | (predecessor_RS >= decoded_threshold_R[:, None])
    finished_RS = open_RS & (left_RS == 0) & whole_R1
    stored_RS = slot_S < leading(finished_RS)[:, None]
    active_RS = open_RS & (left_RS > 0) & whole_R1
    return _without_edits(
        canvas,
        open_R=open_R,
        active_RS=active_RS,
        full_RS=full_RS & open_RS,
        candidates_RC=masked_RC & at_positions(active_RS, canvas.block_RC),
        num_stored_R=stored_RS.sum(dim=1),
        num_committed_R=(canvas.size_RS * stored_RS).sum(dim=1, dtype=torch.int32),
    )


def _without_edits(canvas: Canvas, **decided: Tensor) -> StepPlan:
    """A plan under which decided tokens stay as they are, and no position leads."""
    nowhere_R = torch.zeros_like(canvas.saw_stop_R)
    return StepPlan(
        **decided,
        leads_R=nowhere_R,
        editable_RC=nowhere_R[:, None].expand_as(canvas.block_RC),
        checks_R=nowhere_R,
        settled_R=torch.full_like(canvas.block_RC[:, 0], canvas.block_RC.shape[1]),
    )


def _allow_edits(canvas: Canvas, plan: StepPlan, mask_id: int) -> StepPlan:
    """Let tokens of the first block be replaced until a step without masks replaces none.

    LLaDA2.1 ``generate``: at most so many steps without masks as ``max_post_steps`` says.
    """
    has_masks_R = plan.active_RS[:, 0]
    edits_R = canvas.edits_R & (has_masks_R | (canvas.edits_left_R > 0)) & ~canvas.ended_R
    # Rows of a block that was not fed whole are wrong.
    edits_R &= canvas.fed_RS[:, 0]
    position_C = torch.arange(canvas.block_RC.shape[1], device=edits_R.device)
    editable_RC = (canvas.tokens_RC != mask_id) & (canvas.block_RC == 0)
    editable_RC &= (position_C >= canvas.tail_R[:, None]) & edits_R[:, None]
    checks_R = edits_R & (plan.num_stored_R > 0)
    # Blocks behind the first become the first one before they may be stored.
    one_R = canvas.edits_R & (plan.num_stored_R > 1)
    first_size_R = canvas.size_RS[:, 0]
    num_committed_R = torch.where(one_R, first_size_R, plan.num_committed_R)
    num_stored_R = torch.where(one_R, 1, plan.num_stored_R)
    return replaced(
        plan,
        num_stored_R=num_stored_R,
        num_committed_R=num_committed_R,
        editable_RC=editable_RC,
        checks_R=checks_R,
        settled_R=torch.where(canvas.edits_R, num_committed_R.to(torch.int64), plan.settled_R),
    )


def keep_edited(canvas: Canvas, plan: StepPlan, unmask_RC: Tensor) -> tuple[StepPlan, Tensor]:
    """What the plan becomes when tokens of a block that was to commit are replaced.

    The block is kept for another step, and what the step decided behind it was decided on the
    tokens before: one block at a time it is dropped, which makes riding along exact.
    """
    edited_R = plan.checks_R & (unmask_RC & plan.editable_RC).any(dim=1)
    is_last_R = canvas.edits_left_R <= 1
    settled_R = torch.where(is_last_R, canvas.size_RS[:, 0], 0).to(torch.int64)
    drops_R = edited_R & (canvas.max_active_R == 1)
    plan = replaced(
        plan,
        # A block left open would have to be fed by every step from here on.
        open_R=plan.open_R.masked_fill(drops_R, 1),
        num_stored_R=plan.num_stored_R.masked_fill(edited_R, 0),
        num_committed_R=plan.num_committed_R.masked_fill(edited_R, 0),
        settled_R=torch.where(edited_R, settled_R, plan.settled_R),
    )
    return plan, unmask_RC & ~(drops_R[:, None] & ~plan.editable_RC)


def _first_sub_blocks(canvas: Canvas, plan: StepPlan) -> StepPlan:
    """Of each block only its first sub-block with masks is denoised (Fast-dLLM v2)."""
    num_positions, num_slots = canvas.block_RC.shape[1], plan.full_RS.shape[1]
    position_RC = torch.arange(num_positions, device=canvas.block_RC.device)
    start_RS = torch.nn.functional.pad(canvas.size_RS.cumsum(dim=1), (1, 0))
    place_RC = position_RC - start_RS.gather(1, canvas.block_RC)
    sub_RC = place_RC // canvas.sub_length_R.clamp_min(1)[:, None]
    first_RS = sub_RC.new_full((len(sub_RC), num_slots + 1), num_positions)
    masked_sub_RC = sub_RC.where(plan.candidates_RC, num_positions)
    first_RS.scatter_reduce_(1, canvas.block_RC, masked_sub_RC, "amin")
    in_first_RC = sub_RC == first_RS.gather(1, canvas.block_RC)
    in_first_RC |= (canvas.sub_length_R == 0)[:, None]
    return replaced(plan, candidates_RC=plan.candidates_RC & in_first_RC)


def sub_block_to_store(canvas: Canvas, plan: StepPlan) -> Tensor:
    """Positions whose KV a step with the cache of a block stores, bool ``[R, C]``.

    Fast-dLLM v2 ``generate`` (``use_block_cache``): the sub-block alone once its first token is
    known, everything before that and when the block is stored.
    """
    position_C = torch.arange(canvas.block_RC.shape[1], device=canvas.block_RC.device)
    sub_RC = position_C // canvas.sub_length_R.clamp_min(1)[:, None]
    first_R1 = sub_RC.where(plan.candidates_RC, position_C.shape[0]).amin(dim=1, keepdim=True)
    in_first_RC = sub_RC == first_R1
    head_RC = in_first_RC & (position_C == first_R1 * canvas.sub_length_R[:, None])
    whole_R1 = (head_RC & plan.candidates_RC).any(dim=1, keepdim=True)
    return in_first_RC | whole_R1 | ~plan.candidates_RC.any(dim=1, keepdim=True)


def plan_current_block(canvas: Canvas, mask_id: int) -> StepPlan:
    """One block of a canvas that is seen as a whole; the others wait as masks."""
    active_RS = (canvas.size_RS > 0) & canvas.fed_RS
    in_block_RC = at_positions(active_RS, canvas.block_RC)
    none_R = torch.zeros_like(canvas.open_R)
    return _without_edits(
        canvas,
        open_R=none_R + 1,
        active_RS=active_RS,
        full_RS=active_RS,
        candidates_RC=(canvas.tokens_RC == mask_id) & in_block_RC,
        num_stored_R=none_R.to(torch.int64),
        num_committed_R=none_R,
    )


def plan_leading_position(canvas: Canvas, mask_id: int) -> StepPlan:
    """As :func:`plan_current_block`, but a block's first step decides its first position alone.

    Fast-dLLM's decoder for shifted models: later steps of the block do not compute the row that
    predicts this position.
    """
    return replaced(plan_current_block(canvas, mask_id), leads_R=canvas.step_R == 0)


def settle_blocks(
    canvas: Canvas,
    plan: StepPlan,
    unmask_RC: Tensor,
    tokens_RC: Tensor,
    is_stop_RC: Tensor,
    remaining_R: Tensor,
    mask_id: int,
) -> StepOutcome:
    """Commit finished blocks, or end the request as soon as its text is final.

    A written token changes only where the plan allows edits, so a leading run of decided, settled
    tokens that holds a stop token (or all the tokens asked for) is the final text: it is emitted
    at once, up to and including the stop token, although the KV of its last block was never
    stored (exact early exit).

    Args:
        tokens_RC: the canvas after `unmask_RC` was applied.
        is_stop_RC: positions whose token ends the request.
        remaining_R: int32, tokens the request may still emit.
    """
    run_R, final_R = _final_run(canvas, plan, tokens_RC, is_stop_RC, remaining_R, mask_id)
    ends_R = run_R >= final_R
    num_committed_R = torch.where(ends_R, final_R, plan.num_committed_R)
    return StepOutcome(
        unmask_RC,
        num_committed_R.masked_fill(canvas.ended_R, 0).to(torch.int32),
        torch.zeros_like(ends_R),
        canvas.ended_R | ends_R,
    )


def settle_refreshed(
    canvas: Canvas,
    plan: StepPlan,
    unmask_RC: Tensor,
    tokens_RC: Tensor,
    is_stop_RC: Tensor,
    remaining_R: Tensor,
    mask_id: int,
) -> StepOutcome:
    """Commit the block when it is decided; its KV and all others are then out of date.

    Arguments and the exact early exit as in :func:`settle_blocks`.
    """
    run_R, final_R = _final_run(canvas, plan, tokens_RC, is_stop_RC, remaining_R, mask_id)
    ends_R = run_R >= final_R
    done_R = run_R >= canvas.size_RS[:, 0]
    num_committed_R = torch.where(ends_R, final_R, torch.where(done_R, run_R, 0))
    return StepOutcome(
        unmask_RC,
        num_committed_R.masked_fill(canvas.ended_R, 0).to(torch.int32),
        done_R | ends_R,
        canvas.ended_R | ends_R,
    )


def settle_uncached(
    canvas: Canvas,
    plan: StepPlan,
    unmask_RC: Tensor,
    tokens_RC: Tensor,
    is_stop_RC: Tensor,
    remaining_R: Tensor,
    mask_id: int,
) -> StepOutcome:
    """As :func:`settle_refreshed`; every step is a refresh."""
    outcome = settle_refreshed(canvas, plan, unmask_RC, tokens_RC, is_stop_RC, remaining_R, mask_id)
    refresh_R = torch.ones_like(outcome.refresh_R)
    return StepOutcome(outcome.unmask_RC, outcome.num_committed_R, refresh_R, outcome.ended_R)


def _final_run(
    canvas: Canvas,
    plan: StepPlan,
    tokens_RC: Tensor,
    is_stop_RC: Tensor,
    remaining_R: Tensor,
    mask_id: int,
) -> tuple[Tensor, Tensor]:
    """Length of the leading run of decided tokens, and where in it the text would end."""
    position_C = torch.arange(tokens_RC.shape[1], device=tokens_RC.device)
    open_RC = canvas.block_RC < plan.open_R[:, None]
    run_R = torch.minimum(leading(open_RC & (tokens_RC != mask_id)), plan.settled_R)
    stop_RC = is_stop_RC & (position_C < run_R[:, None])
    first_stop_R = torch.where(stop_RC, position_C, tokens_RC.shape[1]).amin(dim=1)
    return run_R, torch.minimum(first_stop_R + 1, remaining_R)


class Bounds(NamedTuple):
    """Absolute positions of full-attention requests, int ``[R]``.

    first      where the text of this canvas begins; everything before is its prompt
    start      first undecided position: where the canvas starts
    block_stop end of its current block
    stop       end of everything that is computed
    """

    first: np.ndarray
    start: np.ndarray
    block_stop: np.ndarray
    stop: np.ndarray


def bounds(
    prompt_len: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    block_length: np.ndarray,
    canvas_length: int,
    max_model_len: int,
) -> Bounds:
    """Where a canvas lies; `end` is where the text may end at most, prompt included.

    What was asked for is rounded up to whole blocks. More than `canvas_length` positions are
    decoded canvas by canvas, each with everything before it as its prompt.
    """
    most = canvas_length // block_length * block_length
    first = prompt_len + (start - prompt_len) // most * most
    whole = -((first - end) // block_length) * block_length
    stop = np.minimum(first + np.minimum(whole, most), max_model_len)
    return Bounds(first, start, np.minimum(start + block_length, stop), stop)


Span = tuple[np.ndarray, np.ndarray]  # where next passes start and stop, int ``[R]``


def span_semi_autoregressive(canvas: Bounds, keeps_kv: np.ndarray) -> Span:
    """Everything in every step (LLaDA ``generate.py``, Dream ``generation_utils.py``)."""
    return np.zeros_like(canvas.stop), canvas.stop


def span_prefix_cache(canvas: Bounds, keeps_kv: np.ndarray) -> Span:
    """After a refresh, the current block and everything behind it."""
    return np.where(keeps_kv, canvas.start, 0), canvas.stop


def span_dual_cache(canvas: Bounds, keeps_kv: np.ndarray) -> Span:
    """After a refresh, the current block alone."""
    return np.where(keeps_kv, canvas.start, 0), np.where(keeps_kv, canvas.block_stop, canvas.stop)


PlanFunction = Callable[[Canvas, int], StepPlan]
SettleFunction = Callable[[Canvas, StepPlan, Tensor, Tensor, Tensor, Tensor, int], StepOutcome]
SpanFunction = Callable[[Bounds, np.ndarray], Span]

STRATEGIES: dict[str, tuple[PlanFunction, SettleFunction]] = {
    "d2f": (plan_d2f, settle_blocks),
    "block_diffusion": (plan_block_diffusion, settle_blocks),
    "semi_autoregressive": (plan_current_block, settle_uncached),
    "prefix_cache": (plan_current_block, settle_refreshed),
    "dual_cache": (plan_current_block, settle_refreshed),
}

SPANS: dict[str, SpanFunction] = {
    "semi_autoregressive": span_semi_autoregressive,
    "prefix_cache": span_prefix_cache,
    "dual_cache": span_dual_cache,
}
