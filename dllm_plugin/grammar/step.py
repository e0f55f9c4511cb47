"""Apply checks of grammars in a denoising step, on the device.

The forward was launched before the checks were made, on a canvas that may hold drafts which they
refuse. So a step is planned first as if there were no grammar, and this plan is then made to fit.
Shape letters as in :mod:`dllm_plugin.decoding.plan`; G requests of the step with a grammar, W words
of packed bits, K ids that a check names.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.decoding.blocks import at_positions, leading, per_block
from dllm_plugin.decoding.plan import Canvas, StepPlan, replaced

from .automaton import TokenAutomaton
from .state import GrammarCheck

NO_ID = -1
NUM_NUMBERS = 6  # of a check


class Checks(NamedTuple):
    """Upload the checks of a step's requests.

    row_G       int64, request of the step
    known_GK    int64, settled and forced ids of the text, NO_ID after them
    settled_G   int64, how many are settled
    front_G     int64, how many there are: the place of the frontier in the text
    rejected_G  bool, a draft was refused
    must_G      bool, the frontier has to be decided
    writes_G    bool, known ids are written if the canvas lacks them
    chooses_G   bool, something is left to choose at the frontier
    allowed_GW  int32, bits of the ids that may stand there
    """

    row_G: Tensor
    known_GK: Tensor
    settled_G: Tensor
    front_G: Tensor
    rejected_G: Tensor
    must_G: Tensor
    writes_G: Tensor
    chooses_G: Tensor
    allowed_GW: Tensor

    def known_at(self, place_GC: Tensor) -> Tensor:
        """Return the known ids at places of the text, NO_ID if there is none."""
        most = self.known_GK.shape[1]
        known_GC = self.known_GK.gather(1, place_GC.clamp(0, most - 1))
        return known_GC.where((place_GC >= 0) & (place_GC < most), NO_ID)


class GrammarPayload(NamedTuple):
    """Carry the checks of some requests from the scheduler to the workers.

    numbers_GN  int64, the six columns from `settled` to `chooses` of :class:`Checks`
    """

    req_ids: list[str]
    known_GK: np.ndarray
    numbers_GN: np.ndarray
    allowed_GW: np.ndarray


class RowsPayload(NamedTuple):
    """Carry what the rows of causal forwards may choose, from the scheduler to the workers.

    owner_X     int64, index in `req_ids` of the request that each row belongs to
    place_X     int64, canvas position that each row predicts
    allowed_XW  int32, bits of the ids that may stand there
    settled_G   int64, how many leading ids of the canvas may commit
    forced_G    int64, id that replaces the first id, NO_ID for none
    """

    req_ids: list[str]
    owner_X: np.ndarray
    place_X: np.ndarray
    allowed_XW: np.ndarray
    settled_G: np.ndarray
    forced_G: np.ndarray


class AutomatonStart(NamedTuple):
    """Carry the automaton of a request to the workers, in the step with which it starts.

    key        equal for equal automata, which workers store once
    state      after the text that was emitted before
    completes  whether its text has to be complete
    """

    req_id: str
    key: Hashable
    automaton: TokenAutomaton
    state: int
    completes: bool


def pack_checks(
    req_ids: Sequence[str],
    checks: Sequence[GrammarCheck],
    writes: Sequence[bool],
    words: int,
) -> GrammarPayload:
    """Pack checks; `writes`: whether known ids are written, `words`: int32 per row of bits."""
    known = [[*check.settled, *check.forced] for check in checks]
    known_GK = np.full((len(known), max(1, *map(len, known))), NO_ID, dtype=np.int64)
    numbers_GN = np.zeros((len(known), NUM_NUMBERS), dtype=np.int64)
    allowed_GW = np.zeros((len(known), words), dtype=np.int32)
    for i, (check, ids) in enumerate(zip(checks, known, strict=True)):
        known_GK[i, : len(ids)] = ids
        chooses = check.allowed is not None
        flags = (check.rejected, check.must, writes[i], chooses)
        numbers_GN[i] = (len(check.settled), len(ids), *flags)
        if check.allowed is not None:
            allowed_GW[i] = check.allowed
    return GrammarPayload(list(req_ids), known_GK, numbers_GN, allowed_GW)


class Constraint(NamedTuple):
    """Pass the grammars' constraints to the rest of a step.

    drop_R      bool, what was decided or proposed after the frontier is gone
    must_R      bool, the frontier has to be decided
    front_RC    bool, the frontier, if the step may decide it
    behind_RC   bool, positions after the frontier
    """

    drop_R: Tensor
    must_R: Tensor
    front_RC: Tensor
    behind_RC: Tensor


class _Agreed(NamedTuple):
    """Return the canvases with a grammar, made to agree with their checks.

    tokens_GC   int64, with known ids written and refused drafts gone
    settled_G   int64, leading canvas positions that were computed as they are settled
    front_G     int64, canvas position of the frontier
    drop_G      bool, what was decided after the frontier is gone
    lacks_G     bool, known ids are missing and are not written
    """

    tokens_GC: Tensor
    settled_G: Tensor
    front_G: Tensor
    drop_G: Tensor
    lacks_G: Tensor


def _agree(canvas: Canvas, checks: Checks, mask_id: int) -> _Agreed:
    """Make canvases agree with their checks."""
    tail_G1 = canvas.tail_R[checks.row_G].to(torch.int64)[:, None]
    position_C = torch.arange(canvas.tokens_RC.shape[1], device=tail_G1.device)
    place_GC = position_C - tail_G1
    known_GC = checks.known_at(place_GC)
    tokens_GC = canvas.tokens_RC[checks.row_G]
    differs_GC = (known_GC != NO_ID) & (tokens_GC != known_GC)
    agreed_G = leading(~(differs_GC & (place_GC < checks.settled_G[:, None])))
    settled_G = torch.minimum(agreed_G, tail_G1[:, 0] + checks.settled_G)
    drop_G = checks.rejected_G | (differs_GC & (tokens_GC != mask_id)).any(dim=1)
    # Log-probabilities belong to choices: ids that were lost are chosen again.
    lacks_G = differs_GC.any(dim=1) & ~checks.writes_G
    tokens_GC = torch.where(differs_GC & ~lacks_G[:, None], known_GC, tokens_GC)
    front_G = tail_G1[:, 0] + checks.front_G
    gone_GC = (position_C >= front_G[:, None]) & drop_G[:, None]
    return _Agreed(
        tokens_GC.masked_fill(gone_GC, mask_id), settled_G, front_G, drop_G, lacks_G
    )


def constrain(
    canvas: Canvas,
    plan: StepPlan,
    has_row_RC: Tensor,
    checks: Checks,
    mask_id: int,
    causal: bool = False,
) -> tuple[Canvas, StepPlan, Constraint]:
    """Make canvas and plan of a step fit its grammars, after the forward.

    Stored are only blocks that were computed as the grammars have settled them. Forced ids are
    written. After a refused draft everything decided after the frontier becomes masks.

    Args:
        has_row_RC: positions that a logits row of this step predicts.
        causal: the forward that stores a block predicts the token after it.
    """
    agreed = _agree(canvas, checks, mask_id)

    def of_step(value_G: Tensor, fill: int | bool) -> Tensor:
        whole_R = value_G.new_full((len(canvas.tokens_RC),), fill)
        return whole_R.index_copy_(0, checks.row_G, value_G)

    has_R = of_step(torch.ones_like(agreed.drop_G), False)
    drop_R = of_step(agreed.drop_G, False)
    front_R = of_step(agreed.front_G, 0)
    canvas = canvas._replace(
        tokens_RC=canvas.tokens_RC.index_copy(0, checks.row_G, agreed.tokens_GC),
        saw_stop_R=canvas.saw_stop_R & ~has_R,
    )
    num_positions = canvas.tokens_RC.shape[1]
    num_slots = canvas.size_RS.shape[1]
    plan = _store_settled(canvas, plan, of_step(agreed.settled_G, num_positions), has_R)

    position_C = torch.arange(num_positions, device=front_R.device)
    behind_RC = (position_C > front_R[:, None]) & has_R[:, None]
    open_RS = torch.arange(num_slots, device=front_R.device) < plan.open_R[:, None]
    whole_R1 = (canvas.computed_RS | ~open_RS).all(dim=1, keepdim=True)
    free_RC = at_positions(open_RS & whole_R1 & (canvas.size_RS > 0), canvas.block_RC)
    free_RC &= canvas.tokens_RC == mask_id
    chooses_R = of_step(checks.chooses_G & ~agreed.lacks_G, False) & ~canvas.ended_R
    chosen_RC = (position_C == front_R[:, None]) & chooses_R[:, None]
    front_RC = chosen_RC & has_row_RC & free_RC
    kept_RC = ~has_R[:, None] | (behind_RC & free_RC & ~drop_R[:, None])
    candidates_RC = (plan.candidates_RC & kept_RC) | front_RC
    edits_RC = chosen_RC if causal else behind_RC & ~drop_R[:, None]
    editable_RC = plan.editable_RC & (edits_RC | ~has_R[:, None])
    if causal:
        editable_RC &= (plan.num_stored_R > 0)[:, None]
        front_RC |= editable_RC & has_R[:, None]
    plan = replaced(
        plan,
        active_RS=plan.active_RS
        | (per_block(front_RC, canvas.block_RC, num_slots) > 0),
        candidates_RC=candidates_RC,
        editable_RC=editable_RC,
        fixed_R=torch.where(has_R, front_R, plan.fixed_R),
    )
    must_R = of_step(checks.must_G, False) | drop_R
    return canvas, plan, Constraint(drop_R, must_R, front_RC, behind_RC)


def _store_settled(
    canvas: Canvas, plan: StepPlan, settled_R: Tensor, has_R: Tensor
) -> StepPlan:
    """Store only blocks that lie before `settled_R`; keep the others open for another step."""
    slot_S = torch.arange(canvas.size_RS.shape[1], device=settled_R.device)
    stored_RS = slot_S < plan.num_stored_R[:, None]
    stored_RS &= canvas.size_RS.cumsum(dim=1) <= settled_R[:, None]
    num_stored_R = stored_RS.sum(dim=1)
    fewer_R = has_R & (num_stored_R < plan.num_stored_R)
    num_stored_R = torch.where(has_R, num_stored_R, plan.num_stored_R)
    num_committed_R = (canvas.size_RS * stored_RS).sum(dim=1, dtype=torch.int32)
    # A window commits without blocks.
    most_R = torch.minimum(plan.num_committed_R, settled_R.to(torch.int32))
    num_committed_R = torch.where(fewer_R, num_committed_R, most_R)
    # With one active block the next block waits, as for an unfinished block.
    back_R = fewer_R & (canvas.max_active_R == 1)
    return replaced(
        plan,
        open_R=torch.where(back_R, canvas.open_R.clamp_min(1), plan.open_R),
        num_stored_R=num_stored_R,
        num_committed_R=torch.where(has_R, num_committed_R, plan.num_committed_R),
        checks_R=plan.checks_R & ~fewer_R,
    )


def take_frontier(constraint: Constraint, plan: StepPlan, unmask_RC: Tensor) -> Tensor:
    """Return what a step unmasks: no drafts after a refused one, and the frontier if it must.

    The frontier must be decided also if the policy picks nothing of the request.
    """
    unmask_RC = unmask_RC & ~(constraint.drop_R[:, None] & constraint.behind_RC)
    none_R = ~(unmask_RC & plan.candidates_RC).any(dim=1)
    return unmask_RC | (constraint.front_RC & (constraint.must_R | none_R)[:, None])


def fix_stop(
    constraint: Constraint, plan: StepPlan, unmask_RC: Tensor, is_stop_RC: Tensor
) -> StepPlan:
    """Return the plan once the frontier may have taken a stop token, with which the text is final.

    The grammar allows a stop token only where the text may end.
    """
    ends_R = (unmask_RC & constraint.front_RC & is_stop_RC).any(dim=1)
    return replaced(plan, fixed_R=plan.fixed_R + ends_R)


def unpack(allowed_TW: Tensor, vocab_size: int) -> Tensor:
    """Return packed bits as a bool per id, ``[T, W] -> [T, V]``."""
    bit_32 = torch.arange(32, dtype=torch.int32, device=allowed_TW.device)
    flags = (allowed_TW[:, :, None] >> bit_32) & 1
    return flags.flatten(1)[:, :vocab_size].to(torch.bool)
