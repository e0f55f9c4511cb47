"""Take the rounds of a block whose edits delete tokens and insert masks (LLaDA2.2).

The *current block* is the first block of a canvas, or the second once the first is
decided and only commits. A round fills masks, replaces tokens, and then deletes and
inserts. Shape letters as in :mod:`dllm_plugin.decoding.plan`; B positions of a block, K
rounds.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import rank
from .plan import Canvas, Proposal, StepPlan, replaced
from .policies import OF_EDITS, Policy, PolicySettings, Table, joint_threshold

ROUNDS = 1000  # that a block has at most
ATTEMPTS = 5  # to write a row that no earlier round has written


def round_threshold(
    plan: StepPlan, canvas: Canvas, proposal: Proposal, settings: PolicySettings
) -> Tensor:
    """Take as LLaDA2.1's `joint_threshold`, without a quota: that depends on earlier rounds."""
    none_R = torch.zeros_like(settings.num_to_transfer_R)
    settings = settings._replace(num_to_transfer_R=none_R)
    return joint_threshold(plan, canvas, proposal, settings)


STRUCTURED_BLOCKS: Table = {
    "joint_threshold": Policy(
        round_threshold,
        reads=frozenset({"steps", *OF_EDITS} - {"num_to_transfer"}),
        defaults=(("threshold", 0.5), ("editing_threshold", 0.0)),
    )
}


class Rounds(NamedTuple):
    """Describe the rounds that the current blocks have had.

    round_R      int64, rounds of the block
    post_R       int64, rounds in a row that began without an original mask
    decided_R    bool, the first block of the canvas is decided and only commits
    inserted_RB  bool, masks that edits inserted
    seen_RK      int64, hash of the row that each round wrote
    """

    round_R: Tensor
    post_R: Tensor
    decided_R: Tensor
    inserted_RB: Tensor
    seen_RK: Tensor


class Limits(NamedTuple):
    """List the numbers of requests: int64, rounds that fill masks and rounds after these."""

    steps_R: Tensor
    max_post_R: Tensor


class Tokens(NamedTuple):
    """List token ids, and the factors of row hashes, int64.

    best_but  best token of canvas positions ``[R, N]`` but two given tokens and the mask; read
              only if the last argument is true
    """

    mask: int
    delete: int
    split: int
    best_but: Callable[[Tensor, tuple[Tensor, Tensor], Tensor], Tensor]
    factor_B: Tensor


class Row(NamedTuple):
    """Describe the current block of each request.

    runs_R       bool, the block is computed and takes a round
    start_R      int64, its first canvas position
    index_RB     int64, canvas position of each of its positions
    inside_RB    bool, positions that the block has: a context may cut it
    masked_RB    bool, its masks; `free_RB`, positions that edits may change
    tokens_RB    int64, before the round
    """

    runs_R: Tensor
    start_R: Tensor
    index_RB: Tensor
    inside_RB: Tensor
    masked_RB: Tensor
    free_RB: Tensor
    tokens_RB: Tensor


def plan_round(
    canvas: Canvas, plan: StepPlan, rounds: Rounds, mask_id: int
) -> StepPlan:
    """Return the plan of a round; a block without masks commits only once it is decided."""
    current_R = rounds.decided_R.to(torch.int64)
    slot_S = torch.arange(canvas.size_RS.shape[1], device=current_R.device)
    open_R = torch.minimum(plan.open_R, current_R.to(torch.int32) + 1)
    runs_RS = (slot_S == current_R[:, None]) & (slot_S < open_R[:, None])
    runs_RS &= canvas.computed_RS & (canvas.size_RS > 0) & ~canvas.ended_R[:, None]
    position_C = torch.arange(canvas.block_RC.shape[1], device=current_R.device)
    in_block_RC = canvas.block_RC == current_R[:, None]
    in_block_RC &= runs_RS.any(dim=1, keepdim=True)
    is_mask_RC = canvas.tokens_RC == mask_id
    after_prompt_RC = position_C >= canvas.tail_R[:, None]
    committed_R = plan.num_committed_R.where(rounds.decided_R, 0)
    return replaced(
        plan,
        open_R=open_R,
        active_RS=runs_RS,
        candidates_RC=in_block_RC & is_mask_RC,
        editable_RC=in_block_RC & ~is_mask_RC & after_prompt_RC,
        num_stored_R=plan.num_stored_R.where(rounds.decided_R, 0),
        num_committed_R=committed_R,
        checks_R=torch.zeros_like(plan.checks_R),
        fixed_R=committed_R.to(torch.int64),
    )


def current_row(canvas: Canvas, plan: StepPlan, rounds: Rounds, mask_id: int) -> Row:
    """Gather the current blocks of a plan of :func:`plan_round`."""
    length = rounds.inserted_RB.shape[1]
    num_positions = canvas.block_RC.shape[1]
    place_B = torch.arange(length, device=canvas.block_RC.device)
    start_R = rounds.decided_R.to(torch.int64) * length
    index_RB = (start_R[:, None] + place_B).clamp_max(num_positions - 1)
    current_R1 = rounds.decided_R.to(torch.int64)[:, None]
    size_R1 = canvas.size_RS.gather(1, current_R1)
    return Row(
        runs_R=plan.active_RS.any(dim=1),
        start_R=start_R,
        index_RB=index_RB,
        inside_RB=place_B < size_R1,
        masked_RB=plan.candidates_RC.gather(1, index_RB),
        free_RB=(plan.candidates_RC | plan.editable_RC).gather(1, index_RB),
        tokens_RB=canvas.tokens_RC.gather(1, index_RB),
    )


def take_round(
    canvas: Canvas,
    plan: StepPlan,
    proposal: Proposal,
    unmask_RC: Tensor,
    rounds: Rounds,
    limits: Limits,
    tokens: Tokens,
) -> tuple[StepPlan, Proposal, Tensor, Rounds]:
    """Return plan, proposal and what changes after a round, and the rounds so far.

    Args:
        unmask_RC: masks and tokens whose proposals are sure enough.
    """
    row = current_row(canvas, plan, rounds, tokens.mask)
    old_RB = row.tokens_RB
    original_RB = row.masked_RB & ~rounds.inserted_RB
    waits_R = original_RB.any(dim=1)
    post_R = (rounds.post_R + 1).masked_fill(waits_R, 0)
    taken_RB = unmask_RC.gather(1, row.index_RB)
    confidence_RB = proposal.confidence_RC.gather(1, row.index_RB)
    taken_RB |= _quota(row, confidence_RB, rounds, limits)
    fills_rest_R = waits_R & ~(original_RB & ~taken_RB).any(dim=1)
    final_R = torch.where(
        limits.max_post_R > 0, post_R >= limits.max_post_R, fills_rest_R
    )
    final_R = (final_R | (rounds.round_R >= ROUNDS - 1)) & row.runs_R
    taken_RB |= row.masked_RB & final_R[:, None]
    token_RB = proposal.token_RC.gather(1, row.index_RB)
    edits_RB = (token_RB == tokens.delete) | (token_RB == tokens.split)
    edits_RB &= taken_RB & final_R[:, None]
    structural = (
        torch.full_like(old_RB, tokens.delete),
        torch.full_like(old_RB, tokens.split),
    )
    other_RB = tokens.best_but(row.index_RB, structural, edits_RB)
    token_RB = torch.where(edits_RB, other_RB, token_RB)
    new_RB = torch.where(taken_RB, token_RB, old_RB)
    may_leave_R = row.runs_R & ~final_R
    new_RB = _leave_seen(new_RB, row, confidence_RB, rounds, may_leave_R, tokens)
    after_RB, inserted_RB = restructure(new_RB, row, rounds.inserted_RB, tokens)

    rounds = rounds._replace(
        post_R=torch.where(row.runs_R, post_R, rounds.post_R),
        seen_RK=_remember(rounds, new_RB, tokens),
    )
    plan, rounds = _end_round(
        canvas, plan, row, rounds, after_RB, inserted_RB, final_R, limits, tokens.mask
    )
    position_C = torch.arange(canvas.block_RC.shape[1], device=old_RB.device)
    place_RC = position_C - row.start_R[:, None]
    place_RC = place_RC.clamp(0, old_RB.shape[1] - 1)
    after_RC = after_RB.gather(1, place_RC)
    unmask_RC = (plan.candidates_RC | plan.editable_RC) & (after_RC != canvas.tokens_RC)
    return plan, proposal._replace(token_RC=after_RC), unmask_RC, rounds


def _end_round(
    canvas: Canvas,
    plan: StepPlan,
    row: Row,
    rounds: Rounds,
    after_RB: Tensor,
    inserted_RB: Tensor,
    final_R: Tensor,
    limits: Limits,
    mask_id: int,
) -> tuple[StepPlan, Rounds]:
    """Return the plan with what commits, and the rounds; a block that ends begins none.

    Args:
        rounds: with the number of rounds without original masks, and hashes, of this round.
        after_RB, inserted_RB: the rows after the round, and masks that edits inserted.
        final_R: whether the request allows no further round.
    """
    is_masked_RB = (after_RB == mask_id) & row.inside_RB
    changes_RB = (after_RB != row.tokens_RB) & row.free_RB
    settled_R = row.runs_R & ~row.masked_RB.any(dim=1) & ~changes_RB.any(dim=1)
    waits_R = (is_masked_RB & ~inserted_RB).any(dim=1)
    next_post_R = (rounds.post_R + 1).masked_fill(waits_R, 0)
    over_R = ~is_masked_RB.any(dim=1) & (next_post_R > limits.max_post_R)
    ends_R = row.runs_R & (settled_R | final_R | over_R)
    goes_on_R = row.runs_R & ~ends_R
    size_R = canvas.size_RS[:, 0]
    plan = replaced(
        plan,
        num_stored_R=plan.num_stored_R.masked_fill(settled_R, 1),
        num_committed_R=torch.where(settled_R, size_R, plan.num_committed_R),
        fixed_R=torch.where(
            ends_R, row.start_R + row.inside_RB.sum(dim=1), plan.fixed_R
        ),
    )
    waiting_R = rounds.decided_R & (plan.num_stored_R == 0)
    rounds = Rounds(
        torch.where(row.runs_R, (rounds.round_R + 1) * goes_on_R, rounds.round_R),
        rounds.post_R * ~ends_R,
        torch.where(row.runs_R, ends_R & ~settled_R, waiting_R),
        torch.where(
            row.runs_R[:, None], inserted_RB & goes_on_R[:, None], rounds.inserted_RB
        ),
        rounds.seen_RK,
    )
    return plan, rounds


def _quota(row: Row, confidence_RB: Tensor, rounds: Rounds, limits: Limits) -> Tensor:
    """Return the best masks by the quota of the round, and as many as edits inserted."""
    length, steps_R = row.masked_RB.shape[1], limits.steps_R
    # Of the first block the prompt's positions are not free.
    count_R = row.free_RB.sum(dim=1)
    need_R = count_R // steps_R + (rounds.round_R < count_R % steps_R)
    need_R += (row.masked_RB & rounds.inserted_RB).sum(dim=1)
    need_R = need_R.masked_fill(rounds.round_R >= steps_R, length)
    return row.masked_RB & (rank(confidence_RB, row.masked_RB) < need_R[:, None])


def _hash(row_RB: Tensor, tokens: Tokens) -> Tensor:
    """Return a number of each row, int64 ``[R]``; two rows differ in it as good as surely."""
    return (row_RB * tokens.factor_B).sum(dim=1)


def _leave_seen(
    new_RB: Tensor,
    row: Row,
    confidence_RB: Tensor,
    rounds: Rounds,
    may_leave_R: Tensor,
    tokens: Tokens,
) -> Tensor:
    """Change the least sure new token of rows that an earlier round wrote."""
    round_K = torch.arange(rounds.seen_RK.shape[1], device=new_RB.device)
    earlier_RK = round_K < rounds.round_R[:, None]
    for _ in range(ATTEMPTS):
        changes_RB = (new_RB != row.tokens_RB) & row.free_RB
        seen_RK = rounds.seen_RK == _hash(new_RB, tokens)[:, None]
        again_R = (seen_RK & earlier_RK).any(dim=1) & changes_RB.any(dim=1)
        again_R &= may_leave_R
        if again_R.is_cpu and not again_R.any():
            break
        sure_RB = confidence_RB.masked_fill(~changes_RB, float("inf"))
        worst_R1 = sure_RB.argmin(dim=1, keepdim=True)
        held_R1 = new_RB.gather(1, worst_R1)
        again_R1 = again_R[:, None]
        place_R1 = row.index_RB.gather(1, worst_R1)
        other_R1 = tokens.best_but(place_R1, (held_R1, held_R1), again_R1)
        new_RB = new_RB.scatter(1, worst_R1, torch.where(again_R1, other_R1, held_R1))
    return new_RB


def _remember(rounds: Rounds, new_RB: Tensor, tokens: Tokens) -> Tensor:
    """Return the hashes, the hash of this round's row included."""
    place_R1 = rounds.round_R.clamp_max(rounds.seen_RK.shape[1] - 1)[:, None]
    return rounds.seen_RK.scatter(1, place_R1, _hash(new_RB, tokens)[:, None])


def restructure(
    new_RB: Tensor, row: Row, inserted_RB: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """Delete and insert: return the rows, int64, and which masks edits inserted, bool.

    The delete token drops itself; the split token becomes a mask and what stood in its
    place before the round. Rows are filled up with masks, or cut.
    """
    is_split_RB = (new_RB == tokens.split) & row.free_RB
    is_deleted_RB = (new_RB == tokens.delete) & row.free_RB
    count_RB = 1 + is_split_RB.to(torch.int64) - is_deleted_RB.to(torch.int64)
    count_RB = count_RB * row.inside_RB
    stop_RB = count_RB.cumsum(dim=1)
    length = new_RB.shape[1]
    place_B = torch.arange(length, device=new_RB.device)
    place_RB = place_B.expand_as(new_RB).contiguous()
    source_RB = torch.searchsorted(stop_RB, place_RB, right=True)
    is_new_RB = source_RB == length
    source_RB = source_RB.clamp_max(length - 1)
    splits_RB = is_split_RB.gather(1, source_RB)
    is_first_RB = place_RB == (stop_RB - count_RB).gather(1, source_RB)
    is_new_RB |= splits_RB & is_first_RB
    kept_RB = torch.where(is_split_RB, row.tokens_RB, new_RB).gather(1, source_RB)
    after_RB = kept_RB.masked_fill(is_new_RB, tokens.mask)
    return after_RB, is_new_RB | inserted_RB.gather(1, source_RB)
