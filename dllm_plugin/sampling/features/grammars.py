"""Apply checks of grammars to a step: its plan, one more logits row, and prefilled canvases.

Shape letters as in :mod:`dllm_plugin.grammar.step`; N slots.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.grammar.step import (
    NO_ID,
    NUM_NUMBERS,
    Checks,
    Constraint,
    GrammarPayload,
    constrain,
    fix_stop,
    take_frontier,
)
from dllm_plugin.sampling.features.feature import LogitsRows, StepFeature
from dllm_plugin.sampling.features.token_rules import TokenRules
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.sampling.step import DenoisingStep, EmittedTokens
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

NO_ROW = -1


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

    def start_step(self, step: DenoisingStep) -> None:
        """Make canvas and plan fit the grammars, and add a row for each frontier."""
        checks, mask_id = self._found(step.slots_np), self.mask_id
        assert checks is not None
        rows, has_row_RC = self.rows, self.rows.has_row(step)
        causal = self.states.config.method.causal_commit
        step.canvas, plan, self._constraint = constrain(
            step.canvas, step.plan, has_row_RC, checks, mask_id, causal
        )
        rows.replan(step, plan)
        if len(rows.sources(step)[0]):
            self._add_rows(step, checks, self._constraint)

    def _add_rows(
        self, step: DenoisingStep, checks: Checks, constraint: Constraint
    ) -> None:
        """Add a row for each frontier, of the ids that its grammar allows."""
        canvas, row_G = step.canvas, checks.row_G
        slot_G = step.slots_R[row_G]
        tail_G = canvas.tail_R[row_G].to(torch.int64)
        place_G = (tail_G + checks.front_G).clamp_max(canvas.tokens_RC.shape[1] - 1)
        source_G = step.source_RC[row_G, place_G]
        rows_G = step.num_rows + torch.arange(len(row_G), device=row_G.device)
        chunk = RowChunk(
            rows_G,
            self.rows.gather(step, source_G, slot_G),
            None,
            slot_G,
            place_G.to(torch.int32),
            0,
            checks.allowed_GW,
            self._places(step.slots_np),
        )
        is_front_G = constraint.front_RC[row_G, place_G]
        rows_G = torch.where(is_front_G, rows_G, source_G)
        step.source_RC = step.source_RC.index_put((row_G, place_G), rows_G)
        step.num_rows += len(row_G)
        step.chunks = [*step.chunks, chunk]

    def restrict(self, step: DenoisingStep) -> None:
        """Drop drafts after the frontier, and unmask the frontier if it has to be decided."""
        constraint = self._constraint
        assert constraint is not None
        step.unmask_RC = take_frontier(constraint, step.plan, step.unmask_RC)
        is_stop_RC = self.rules.is_stop(step.proposal.token_RC, step.slots_R)
        step.plan = fix_stop(constraint, step.plan, step.unmask_RC, is_stop_RC)

    def finish_batch(
        self, logits_TV: Tensor, batch: "InputBatch", emitted: EmittedTokens
    ) -> EmittedTokens:
        """Write known ids to the canvases of prefilled requests."""
        prefills = slice(count_canvases(batch), batch.num_reqs)
        self.write_prefilled(batch.idx_mapping_np[prefills])
        return emitted

    def _places(self, slots_np: np.ndarray) -> np.ndarray:
        """Return the places of requests with checks among the slots of a step."""
        row_N = np.full(len(self.states.open_N), NO_ROW, dtype=np.int64)
        row_N[slots_np] = np.arange(len(slots_np))
        rows = row_N[self.slots_np]
        return rows[rows != NO_ROW]

    def _found(self, slots_np: np.ndarray) -> Checks | None:
        """Return the checks of the requests in a step, on the device."""
        payload = self.payload
        if payload is None:
            return None
        here, rows = np.isin(self.slots_np, slots_np), self._places(slots_np)
        if not here.any():
            return None
        whole = np.concatenate(
            [rows[:, None], payload.numbers_GN[here], payload.known_GK[here]], axis=1
        )
        staged = async_tensor_h2d(whole, device=self.states.device)
        row_G, settled_G, front_G, *numbers = staged[:, : 1 + NUM_NUMBERS].unbind(1)
        known_GK = staged[:, 1 + NUM_NUMBERS :]
        flags = [number_G > 0 for number_G in numbers]
        allowed_np = payload.allowed_GW[here]
        allowed_GW = async_tensor_h2d(allowed_np, device=self.states.device)
        return Checks._make((row_G, known_GK, settled_G, front_G, *flags, allowed_GW))

    def allowed_first(self, slots_np: np.ndarray, place_R: Tensor) -> Tensor | None:
        """Return which ids may be first tokens, int32 ``[R, W]``; None if any may.

        Args:
            place_R: canvas position of the first token of each of these slots.
        """
        checks = self._found(slots_np)
        if checks is None:
            return None
        row_G = checks.row_G
        slots = async_tensor_h2d(slots_np, device=place_R.device)[row_G]
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
        canvas_NC, tail_N = self.states.canvas_NC, self.states.tail_N
        slots_G = async_tensor_h2d(slots_np, device=canvas_NC.device)[checks.row_G]
        position_C = torch.arange(canvas_NC.shape[1], device=canvas_NC.device)
        place_GC = position_C - tail_N[slots_G].to(torch.int64)[:, None]
        known_GC = checks.known_at(place_GC)
        tokens_GC = canvas_NC[slots_G]
        write_GC = (tokens_GC == self.mask_id) & (known_GC != NO_ID)
        write_GC &= checks.writes_G[:, None]
        canvas_NC[slots_G] = torch.where(write_GC, known_GC, tokens_GC)
