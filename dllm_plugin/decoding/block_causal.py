"""Plan and commit the steps of block-causal strategies. Siblings with one signature.

``plan_*`` reads the state before the forward, ``commit_*`` writes the outcome after it; both are
batched over the requests of a step and stay on the device. Shape letters as in
:mod:`dllm_plugin.decoding.plan`. Definitions: D2F (arXiv 2508.09192) and its reference code
(``eval_dream.py``, ``eval_llada.py``); LLaDA2 and Fast-dLLM v2 ``generate``; restated with their
traps in ``docs/decoding.md``.
"""

import torch
from torch import Tensor

from .blocks import at_positions, leading, per_block
from .plan import Canvas, StepOutcome, StepPlan, replaced


def plan_d2f(canvas: Canvas, mask_id: int) -> StepPlan:
    """Plan discrete diffusion forcing: several blocks at once (D2F paper, algorithm 2).

    At most one block is opened per step, when the last block is decided far enough; a block whose
    predecessor is decided far enough is fully activated for good; ratios compare with ``>=``.
    """
    return _plan_blocks(
        canvas, mask_id, canvas.block_add_threshold_R, canvas.decoded_token_threshold_R
    )


def plan_block_diffusion(canvas: Canvas, mask_id: int) -> StepPlan:
    """Plan one block after the other; a finished block commits while the next block is denoised.

    To compute the finished block and the first step of its successor in one forward is exact: keys
    of the finished block do not depend on later positions. If more than one block may be
    active, blocks are opened and activated as in D2F.
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
    """Plan as :func:`plan_block_diffusion`; tokens of the first block may be edited (LLaDA2.1)."""
    return _allow_edits(canvas, plan_block_diffusion(canvas, mask_id), mask_id)


def plan_sub_blocks(canvas: Canvas, mask_id: int) -> StepPlan:
    """Plan as :func:`plan_block_diffusion`, sub-block after sub-block (Fast-dLLM v2)."""
    plan = plan_block_diffusion(canvas, mask_id)
    # Only the first sub-block with masks of each block is decoded.
    num_positions = canvas.block_RC.shape[1]
    num_slots = plan.full_RS.shape[1]
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


def _plan_blocks(
    canvas: Canvas,
    mask_id: int,
    add_threshold_R: Tensor,
    decoded_threshold_R: Tensor,
    max_active_R: Tensor | None = None,
) -> StepPlan:
    """Open and activate blocks by the shares of them that are decided."""
    num_slots = canvas.size_RS.shape[1]
    slot_S = torch.arange(num_slots, device=canvas.open_R.device)
    masked_RC = canvas.tokens_RC == mask_id
    left_RS = per_block(masked_RC, canvas.block_RC, num_slots)
    # The reference divides too, so equality with a threshold means the same here.
    done_RS = (canvas.size_RS - left_RS) / canvas.size_RS.clamp_min(1)
    predecessor_RS = torch.nn.functional.pad(done_RS[:, :-1], (1, 0), value=1.0)

    add_RS = (slot_S == canvas.open_R[:, None]) & (canvas.size_RS > 0)
    add_RS &= canvas.computed_RS
    add_RS &= predecessor_RS >= add_threshold_R[:, None]
    # The first block opens all the same: a grammar may have written the stop token before that.
    first_RS = (slot_S == 0) & ~canvas.ended_R[:, None]
    add_RS &= first_RS | ~canvas.saw_stop_R[:, None]
    if max_active_R is not None:
        active_R = ((slot_S < canvas.open_R[:, None]) & (left_RS > 0)).sum(dim=1)
        add_RS &= (active_R < max_active_R)[:, None]
    open_R = canvas.open_R + add_RS.sum(dim=1, dtype=torch.int32)
    open_RS = slot_S < open_R[:, None]
    # A step that did not compute every open block decides nothing: their rows would be wrong.
    whole_R1 = (canvas.computed_RS | ~open_RS).all(dim=1, keepdim=True)

    full_RS = canvas.full_RS | (predecessor_RS >= decoded_threshold_R[:, None])
    finished_RS = open_RS & (left_RS == 0) & whole_R1
    stored_RS = slot_S < leading(finished_RS)[:, None]
    active_RS = open_RS & (left_RS > 0) & whole_R1
    return without_edits(
        canvas,
        open_R=open_R,
        active_RS=active_RS,
        full_RS=full_RS & open_RS,
        candidates_RC=masked_RC & at_positions(active_RS, canvas.block_RC),
        num_stored_R=stored_RS.sum(dim=1),
        num_committed_R=(canvas.size_RS * stored_RS).sum(dim=1, dtype=torch.int32),
    )


def without_edits(canvas: Canvas, **decided: Tensor) -> StepPlan:
    """Return a plan that edits no token and does not restrict a step to its first position."""
    nowhere_R = torch.zeros_like(canvas.saw_stop_R)
    return StepPlan(
        **decided,
        first_only_R=nowhere_R,
        editable_RC=nowhere_R[:, None].expand_as(canvas.block_RC),
        checks_R=nowhere_R,
        fixed_R=torch.full_like(canvas.block_RC[:, 0], canvas.block_RC.shape[1]),
    )


def _allow_edits(canvas: Canvas, plan: StepPlan, mask_id: int) -> StepPlan:
    """Allow edits of the first block until a step without masks replaces no token.

    LLaDA2.1 ``generate``: at most ``max_post_steps`` steps without masks.
    """
    has_masks_R = plan.active_RS[:, 0]
    edits_R = canvas.edits_R & ~canvas.ended_R
    edits_R &= has_masks_R | (canvas.edits_left_R > 0)
    # Rows of a block that was not computed whole are wrong.
    edits_R &= canvas.computed_RS[:, 0]
    position_C = torch.arange(canvas.block_RC.shape[1], device=edits_R.device)
    editable_RC = (canvas.tokens_RC != mask_id) & (canvas.block_RC == 0)
    editable_RC &= (position_C >= canvas.tail_R[:, None]) & edits_R[:, None]
    checks_R = edits_R & (plan.num_stored_R > 0)
    # Later blocks become the first block before they may be stored.
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
        fixed_R=torch.where(
            canvas.edits_R, num_committed_R.to(torch.int64), plan.fixed_R
        ),
    )


def keep_edited(
    canvas: Canvas, plan: StepPlan, unmask_RC: Tensor
) -> tuple[StepPlan, Tensor]:
    """Return the plan, and what is unmasked, once tokens of a finished block were replaced.

    The block is kept for another step. What the step decided after it rests on the replaced
    tokens: with one active block that is dropped, so that computing two blocks at once is exact.
    """
    edited_R = plan.checks_R & (unmask_RC & plan.editable_RC).any(dim=1)
    is_last_R = canvas.edits_left_R <= 1
    fixed_R = torch.where(is_last_R, canvas.size_RS[:, 0], 0).to(torch.int64)
    drops_R = edited_R & (canvas.max_active_R == 1)
    plan = replaced(
        plan,
        # A block left open would have to be computed by every step from here on.
        open_R=plan.open_R.masked_fill(drops_R, 1),
        num_stored_R=plan.num_stored_R.masked_fill(edited_R, 0),
        num_committed_R=plan.num_committed_R.masked_fill(edited_R, 0),
        fixed_R=torch.where(edited_R, fixed_R, plan.fixed_R),
    )
    return plan, unmask_RC & ~(drops_R[:, None] & ~plan.editable_RC)


def sub_block_to_store(canvas: Canvas, plan: StepPlan) -> Tensor:
    """Return the positions whose KV is stored under ``use_block_cache``, bool ``[R, C]``.

    Fast-dLLM v2 ``generate``: only the sub-block once its first token is known, everything before
    that and when the block is stored.
    """
    position_C = torch.arange(canvas.block_RC.shape[1], device=canvas.block_RC.device)
    sub_RC = position_C // canvas.sub_length_R.clamp_min(1)[:, None]
    first_R1 = sub_RC.where(plan.candidates_RC, position_C.shape[0]).amin(
        dim=1, keepdim=True
    )
    in_first_RC = sub_RC == first_R1
    head_RC = in_first_RC & (position_C == first_R1 * canvas.sub_length_R[:, None])
    whole_R1 = (head_RC & plan.candidates_RC).any(dim=1, keepdim=True)
    return in_first_RC | whole_R1 | ~plan.candidates_RC.any(dim=1, keepdim=True)


def commit_blocks(
    canvas: Canvas, plan: StepPlan, unmask_RC: Tensor, run_R: Tensor, final_R: Tensor
) -> StepOutcome:
    """Commit finished blocks, or end the request as soon as its text is final.

    A decided token changes only if the plan allows edits. So a leading run of decided tokens
    that no edit can reach, if it holds a stop token or all the tokens asked for, is the final text:
    it is emitted at once, up to and including the stop token, although the KV of its last block was
    never stored (exact early exit).

    Args:
        run_R, final_R: what :func:`final_run` finds after `unmask_RC` was applied.
    """
    ends_R = run_R >= final_R
    num_committed_R = torch.where(ends_R, final_R, plan.num_committed_R)
    return StepOutcome(
        unmask_RC,
        num_committed_R.masked_fill(canvas.ended_R, 0).to(torch.int32),
        torch.zeros_like(ends_R),
        canvas.ended_R | ends_R,
    )


def final_run(
    canvas: Canvas,
    plan: StepPlan,
    tokens_RC: Tensor,
    is_stop_RC: Tensor,
    remaining_R: Tensor,
    mask_id: int,
) -> tuple[Tensor, Tensor]:
    """Return the length of the leading run of decided tokens, and where the text would end.

    Args:
        is_stop_RC: positions whose token ends the request.
        remaining_R: int32, tokens the request may still emit.
    """
    position_C = torch.arange(tokens_RC.shape[1], device=tokens_RC.device)
    open_RC = canvas.block_RC < plan.open_R[:, None]
    run_R = torch.minimum(leading(open_RC & (tokens_RC != mask_id)), plan.fixed_R)
    stop_RC = is_stop_RC & (position_C < run_R[:, None])
    first_stop_R = torch.where(stop_RC, position_C, tokens_RC.shape[1]).amin(dim=1)
    return run_R, torch.minimum(first_stop_R + 1, remaining_R)
