"""Apply checks of grammars to a step: its plan, more logits rows, and prefilled canvases.

Shape letters as in :mod:`dllm_plugin.grammar.step`; N slots, X restricted rows.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.decoding.plan import replaced
from dllm_plugin.grammar.step import (
    NO_ID,
    NUM_NUMBERS,
    Checks,
    Constraint,
    GrammarPayload,
    RowsPayload,
    constrain,
    fix_stop,
    take_frontier,
)
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.sampling.step import Emitted, LogitsRows, Step
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases

from .feature import StepFeature
from .token_rules import TokenRules

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

NO_ROW = -1
REFUSED = -1  # no id: a draft that no proposal repeats


class StagedChecks(StepFeature):
    """Apply the checks that came with a step.

    payload   what came with this step; None without checks
    slots_np  int64 ``[G]``, slots of its requests
    """

    def __init__(
        self, states: CanvasStates, rows: LogitsRows, rules: TokenRules
    ) -> None:
        super().__init__(states)
        self.rows = rows
        self.rules = rules
        self.payload: GrammarPayload | None = None
        self.slots_np = np.zeros(0, dtype=np.int64)
        self._constraint: Constraint | None = None

    def stage(self, payload: GrammarPayload | None) -> None:
        """Stage what came with the step that is sampled next; None for nothing."""
        if payload is None and self.payload is None:
            return
        self.payload = payload
        req_ids = [] if payload is None else payload.req_ids
        slots = [self.states.req_id_to_slot[req_id] for req_id in req_ids]
        self.slots_np = np.array(slots, dtype=np.int64)
        self.users_np[:] = False
        self.users_np[self.slots_np] = True
        self.in_use = bool(slots)

    def start_step(self, step: Step) -> None:
        """Make canvas and plan fit the grammars, and add a row for each frontier."""
        checks = self._found(step.slots_np)
        rows = self.rows
        assert checks is not None
        step.canvas, plan, self._constraint = constrain(
            step.canvas,
            step.plan,
            rows.has_row(step),
            checks,
            self.mask_id,
            self.method.causal_commit,
        )
        rows.replan(step, plan)
        if not len(rows.sources(step)[0]):
            return
        row_G = checks.row_G
        tail_G = step.canvas.tail_R[row_G].to(torch.int64)
        place_G = (tail_G + checks.front_G).clamp_max(self.num_positions - 1)
        where = row_G, place_G
        is_front_G = self._constraint.front_RC[where]
        owner_np = self._index(step.slots_np)
        owner_np = owner_np[owner_np != NO_ROW]
        self._add_rows(step, where, checks.allowed_GW, owner_np, is_front_G)

    def _add_rows(
        self,
        step: Step,
        where: tuple[Tensor, Tensor],
        allowed_XW: Tensor,
        owner_np: np.ndarray,
        serves_X: Tensor | None = None,
    ) -> None:
        """Add rows of the ids that grammars allow.

        Args:
            where: request of the step and canvas position of each row, int64 ``[X]``.
            owner_np: that request on the host.
            serves_X: bool, its position takes its token from this row; None: all do.
        """
        row_X, place_X = where
        slot_X = step.slots_R[row_X]
        source_X = step.source_RC[where]
        rows_X = step.new_rows(len(row_X))
        chunk = RowChunk(
            rows_X,
            self.rows.gather(step, source_X, slot_X),
            slot_X,
            place_X.to(torch.int32),
            allowed_TW=allowed_XW,
            owner_np=owner_np,
        )
        if serves_X is not None:
            rows_X = rows_X.where(serves_X, source_X)
        step.add_rows(chunk, where, rows_X)

    def restrict(self, step: Step) -> None:
        """Drop drafts after the frontier, and unmask the frontier if it has to be decided."""
        constraint = self._constraint
        assert constraint is not None
        step.unmask_RC = take_frontier(constraint, step.plan, step.unmask_RC)
        is_stop_RC = self.rules.is_stop(step.proposal.token_RC, step.slots_R)
        step.plan = fix_stop(constraint, step.plan, step.unmask_RC, is_stop_RC)

    def finish_batch(
        self, logits_TV: Tensor, batch: "InputBatch", emitted: Emitted
    ) -> Emitted:
        """Write known ids to the canvases of prefilled requests."""
        prefills = slice(count_canvases(batch), batch.num_reqs)
        self.write_prefilled(batch.idx_mapping_np[prefills])
        return emitted

    def _index(self, slots_np: np.ndarray) -> np.ndarray:
        """Return the place in a batch of each request with checks, NO_ROW if it has none."""
        row_N = np.full(self.num_slots, NO_ROW, dtype=np.int64)
        row_N[slots_np] = np.arange(len(slots_np))
        return row_N[self.slots_np]

    def _found(self, slots_np: np.ndarray) -> Checks | None:
        """Return the checks of the requests in a step, on the device."""
        payload = self.payload
        if payload is None:
            return None
        index = self._index(slots_np)
        here = index != NO_ROW
        if not here.any():
            return None
        columns = index[:, None], payload.numbers_GN, payload.known_GK
        staged = self.upload(np.concatenate(columns, axis=1)[here])
        count = 1 + NUM_NUMBERS
        row_G, settled_G, front_G, *numbers = staged[:, :count].unbind(1)
        known_GK = staged[:, count:]
        flags = [number_G > 0 for number_G in numbers]
        allowed_GW = self.upload(payload.allowed_GW[here])
        found = row_G, known_GK, settled_G, front_G, *flags, allowed_GW
        return Checks._make(found)

    def allowed_first(self, slots_np: np.ndarray, place_R: Tensor) -> Tensor | None:
        """Return which ids may be first tokens, int32 ``[R, W]``; None if any may.

        Args:
            place_R: canvas position of the first token of each of these slots.
        """
        checks = self._found(slots_np)
        if checks is None:
            return None
        row_G = checks.row_G
        slots = self.upload(slots_np)[row_G]
        front_G = self.states.tail_N[slots].to(torch.int64) + checks.front_G
        is_front_G = (front_G == place_R[row_G]) & checks.chooses_G
        allowed_GW = torch.where(is_front_G[:, None], checks.allowed_GW, -1)
        every_RW = allowed_GW.new_full((len(slots_np), allowed_GW.shape[1]), -1)
        return every_RW.index_copy(0, row_G, allowed_GW)

    def write_prefilled(self, slots_np: np.ndarray) -> None:
        """Write known ids to the masked positions of canvases that this step has prefilled."""
        checks = self._found(slots_np)
        if checks is None:
            return
        canvas_NC = self.states.canvas_NC
        tail_N = self.states.tail_N
        slots_G = self.upload(slots_np)[checks.row_G]
        tail_G1 = tail_N[slots_G].to(torch.int64)[:, None]
        known_GC = checks.known_at(self.position_C - tail_G1)
        tokens_GC = canvas_NC[slots_G]
        write_GC = (tokens_GC == self.mask_id) & (known_GC != NO_ID)
        write_GC &= checks.writes_G[:, None]
        canvas_NC[slots_G] = known_GC.where(write_GC, tokens_GC)


class VerifiedRows(StagedChecks):
    """Restrict the rows of causal forwards, and keep no draft that a grammar refuses."""

    payload: RowsPayload | None  # type: ignore[assignment]
    _decided: tuple[Tensor, Tensor, Tensor]

    def start_step(self, step: Step) -> None:
        """Add a restricted row for each place that a grammar knows."""
        payload = self.payload
        assert payload is not None
        row_np = self._index(step.slots_np)
        columns = np.stack([row_np, payload.settled_G, payload.forced_G])
        staged = columns[:, row_np != NO_ROW]
        row_G, settled_G, forced_G = self.upload(staged)  # settled counts, forced ids
        self._decided = row_G, settled_G, forced_G
        owner_np, keep_np = self._owners(step.slots_np)
        if not len(owner_np):
            return
        row_X, place_X, allowed_XW = self._rows(owner_np, keep_np)
        self._add_rows(step, (row_X, place_X), allowed_XW, owner_np)

    def restrict(self, step: Step) -> None:
        """Refuse the draft after the settled ids."""
        row_G, settled_G, _ = self._decided
        canvas = step.canvas
        tokens_GC = canvas.tokens_RC[row_G]
        position_C = self.position_C
        refused_GC = (position_C == settled_G[:, None]) & (position_C > 0)
        refused_GC &= tokens_GC != self.mask_id
        refused_GC &= ~canvas.ended_R[row_G][:, None]
        if self.method.causal_commit:
            # Nothing is verified by the forward that drafts.
            refused_GC &= (step.plan.num_stored_R[row_G] > 0)[:, None]
        tokens_GC = tokens_GC.masked_fill(refused_GC, REFUSED)
        tokens_RC = canvas.tokens_RC.index_copy(0, row_G, tokens_GC)
        step.canvas = canvas._replace(tokens_RC=tokens_RC)

    def accept(self, step: Step) -> None:
        """Take nothing of a step whose first id is not settled; replace that id."""
        row_G, settled_G, forced_G = self._decided
        canvas, plan = step.canvas, step.plan
        void_R = torch.zeros_like(canvas.ended_R)
        void_R = void_R.index_copy(0, row_G, settled_G == 0) & ~canvas.ended_R
        first_G = forced_G.where(forced_G != NO_ID, canvas.tokens_RC[row_G, 0])
        first_R = canvas.tokens_RC[:, 0].index_copy(0, row_G, first_G)
        tokens_RC = canvas.tokens_RC.masked_fill(void_R[:, None], self.mask_id)
        tokens_RC[:, 0] = first_R.where(void_R, tokens_RC[:, 0])
        step.canvas = canvas._replace(tokens_RC=tokens_RC)
        step.plan = replaced(
            plan,
            num_stored_R=plan.num_stored_R.masked_fill(void_R, 0),
            num_committed_R=plan.num_committed_R.masked_fill(void_R, 0),
            fixed_R=plan.fixed_R.masked_fill(void_R, 1),
        )
        step.unmask_RC = step.unmask_RC & ~void_R[:, None]

    def finish_batch(
        self, logits_TV: Tensor, batch: "InputBatch", emitted: Emitted
    ) -> Emitted:
        """Write nothing: a grammar restricts the first token of a text, too."""
        return emitted

    def allowed_first(self, slots_np: np.ndarray, place_R: Tensor) -> Tensor | None:
        """Return which ids may be first tokens of texts, int32 ``[R, W]``; None if any may."""
        owner_np, keep_np = self._owners(slots_np)
        if not len(owner_np):
            return None
        row_X, _, allowed_XW = self._rows(owner_np, keep_np)
        every_RW = allowed_XW.new_full((len(slots_np), allowed_XW.shape[1]), -1)
        return every_RW.index_copy(0, row_X, allowed_XW)

    def _owners(self, slots_np: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the place in a batch of the owner of each row, and which rows those are."""
        if self.payload is None:
            nothing_np = np.zeros(0, dtype=np.int64)
            return nothing_np, nothing_np
        owner_np = self._index(slots_np)[self.payload.owner_X]
        keep_np = np.flatnonzero(owner_np != NO_ROW)
        return owner_np[keep_np], keep_np

    def _rows(
        self, owner_np: np.ndarray, keep_np: np.ndarray
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return place in the batch, canvas position and allowed ids of rows, on the device."""
        assert self.payload is not None
        payload = self.payload
        staged = np.stack([owner_np, payload.place_X[keep_np]])
        row_X, place_X = self.upload(staged)
        return row_X, place_X, self.upload(payload.allowed_XW[keep_np])
