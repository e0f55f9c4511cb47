"""Bring checks of grammars into a step: to its plan, to one more logits row, to prefilled canvases.

Nothing of this runs in a step without a request that has a grammar. Shape letters as in
:mod:`dllm_plugin.grammar.step`; N slots.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.plan import StepPlan
from dllm_plugin.grammar.payload import NUMBERS, GrammarPayload
from dllm_plugin.grammar.step import NO_ID, Checks, Constraint, constrain
from dllm_plugin.sampling.rows import RowChunk, StepRows
from dllm_plugin.state.canvas_states import CanvasStates

NO_ROW = -1


class LogitsRows(Protocol):
    """Describe what grammars ask of the two ways to find logits rows."""

    def has_row(self, step: StepRows) -> Tensor:
        """Return the positions that a row of this step predicts, bool ``[R, C]``."""

    def num_columns(self, step: StepRows) -> int:
        """Return how many leading positions of canvases can have a row, as the host knows."""

    def gather(
        self, step: StepRows, logits_TV: Tensor, row_G: Tensor, slot_G: Tensor
    ) -> Tensor:
        """Return some rows of the step, ``[G, V]``."""

    def sources(self, step: StepRows) -> tuple[Tensor, Tensor | None]:
        """Return the tensor whose rows positions count, and the rows by slot that come behind."""

    def replan(self, step: StepRows, plan: StepPlan) -> StepRows:
        """Return the step with another plan."""


class StagedChecks:
    """Hold the checks that the next step applies; None where it has none.

    payload   what came with this step
    slots_np  int64 ``[G]``, slots of its requests
    """

    def __init__(self, states: CanvasStates) -> None:
        self.states = states
        self.payload: GrammarPayload | None = None
        self.slots_np = np.zeros(0, dtype=np.int64)

    def stage(self, payload: GrammarPayload | None) -> None:
        """Take what came with the step that is sampled next."""
        self.payload = payload
        if payload is not None:
            slots = [self.states.req_id_to_slot[req_id] for req_id in payload.req_ids]
            self.slots_np = np.array(slots, dtype=np.int64)

    def constrain(
        self, step: StepRows, logits_TV: Tensor, rows: LogitsRows
    ) -> tuple[StepRows, Constraint | None]:
        """Make a step fit its grammars, with one more row for each frontier."""
        found = self._found(step.slots_np)
        if found is None:
            return step, None
        checks, mask_id = found, self.states.config.mask_token_id
        has_row_RC = rows.has_row(step)
        canvas, plan, constraint = constrain(
            step.canvas, step.plan, has_row_RC, checks, mask_id
        )
        step = rows.replan(step._replace(canvas=canvas), plan)
        if not len(logits_TV):
            return step, constraint
        row_G = checks.row_G
        slot_G = step.slots_R[row_G]
        tail_G = canvas.tail_R[row_G].to(torch.int64)
        place_G = (tail_G + checks.front_G).clamp_max(canvas.tokens_RC.shape[1] - 1)
        source_G = step.source_RC[row_G, place_G]
        rows_G = step.num_rows + torch.arange(len(row_G), device=row_G.device)
        chunk = RowChunk(
            rows_G,
            rows.gather(step, logits_TV, source_G, slot_G),
            None,
            slot_G,
            place_G.to(torch.int32),
            0,
            checks.allowed_GW,
            self._places(step.slots_np),
        )
        is_front_G = constraint.front_RC[row_G, place_G]
        source_RC = step.source_RC.index_put(
            (row_G, place_G), torch.where(is_front_G, rows_G, source_G)
        )
        step = step._replace(
            source_RC=source_RC,
            num_rows=step.num_rows + len(row_G),
            chunks=[*step.chunks, chunk],
        )
        return step, constraint

    def _places(self, slots_np: np.ndarray) -> np.ndarray:
        """Return the places of requests with a grammar among the slots of a step."""
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
        number = dict(
            zip(NUMBERS, staged[:, 1 : 1 + len(NUMBERS)].unbind(1), strict=True)
        )
        return Checks(
            row_G=staged[:, 0],
            known_GK=staged[:, 1 + len(NUMBERS) :],
            settled_G=number["settled"],
            front_G=number["front"],
            rejected_G=number["rejected"] > 0,
            must_G=number["must"] > 0,
            writes_G=number["writes"] > 0,
            chooses_G=number["chooses"] > 0,
            allowed_GW=async_tensor_h2d(
                payload.allowed_GW[here], device=self.states.device
            ),
        )

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
        """Write known ids to canvases that this step has prefilled, where they hold masks."""
        checks = self._found(slots_np)
        if checks is None:
            return
        canvas_NC, tail_N = self.states.canvas_NC, self.states.tail_N
        slots_G = async_tensor_h2d(slots_np, device=canvas_NC.device)[checks.row_G]
        position_C = torch.arange(canvas_NC.shape[1], device=canvas_NC.device)
        place_GC = position_C - tail_N[slots_G].to(torch.int64)[:, None]
        most = checks.known_GK.shape[1]
        known_GC = checks.known_GK.gather(1, place_GC.clamp(0, most - 1))
        known_GC = known_GC.where((place_GC >= 0) & (place_GC < most), NO_ID)
        tokens_GC = canvas_NC[slots_G]
        write_GC = (tokens_GC == self.states.config.mask_token_id) & (known_GC != NO_ID)
        write_GC &= checks.writes_G[:, None]
        canvas_NC[slots_G] = torch.where(write_GC, known_GC, tokens_GC)
