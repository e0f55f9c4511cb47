"""Restrict the rows of causal forwards that verify drafts to what grammars allow.

Shape letters as in :mod:`dllm_plugin.grammar.step`; X restricted rows.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.plan import replaced
from dllm_plugin.grammar.step import NO_ID, RowsPayload
from dllm_plugin.sampling.features.grammars import NO_ROW, StagedChecks
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.sampling.step import DenoisingStep, EmittedTokens

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

REFUSED = -1  # no id: a draft that no proposal repeats


class VerifiedRows(StagedChecks):
    """Restrict rows, and keep no draft that a grammar refuses."""

    payload: RowsPayload | None  # type: ignore[assignment]

    def start_step(self, step: DenoisingStep) -> None:
        """Add a restricted row for each place that a grammar knows."""
        owner_np, keep_np = self._owners(step.slots_np)
        if not len(owner_np):
            return
        row_X, place_X, allowed_XW = self._rows(owner_np, keep_np)
        slot_X = step.slots_R[row_X]
        source_X = step.source_RC[row_X, place_X]
        rows_X = step.num_rows + torch.arange(len(row_X), device=row_X.device)
        chunk = RowChunk(
            rows_X,
            self.rows.gather(step, source_X, slot_X),
            None,
            slot_X,
            place_X.to(torch.int32),
            0,
            allowed_XW,
            owner_np,
        )
        step.chunks = [*step.chunks, chunk]
        step.source_RC = step.source_RC.index_put((row_X, place_X), rows_X)
        step.num_rows += len(row_X)

    def restrict(self, step: DenoisingStep) -> None:
        """Refuse the draft after the settled ids."""
        row_G, settled_G, _ = self._decisions(step.slots_np)
        canvas = step.canvas
        tokens_GC = canvas.tokens_RC[row_G]
        position_C = torch.arange(tokens_GC.shape[1], device=row_G.device)
        refused_GC = (position_C == settled_G[:, None]) & (position_C > 0)
        refused_GC &= (tokens_GC != self.mask_id) & ~canvas.ended_R[row_G][:, None]
        if self.states.config.method.causal_commit:
            # Nothing is verified by the forward that drafts.
            refused_GC &= (step.plan.num_stored_R[row_G] > 0)[:, None]
        tokens_GC = tokens_GC.masked_fill(refused_GC, REFUSED)
        tokens_RC = canvas.tokens_RC.index_copy(0, row_G, tokens_GC)
        step.canvas = canvas._replace(tokens_RC=tokens_RC)

    def accept(self, step: DenoisingStep) -> None:
        """Take nothing of a step whose first id is not settled; replace that id."""
        row_G, settled_G, forced_G = self._decisions(step.slots_np)
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
        self, logits_TV: Tensor, batch: "InputBatch", emitted: EmittedTokens
    ) -> EmittedTokens:
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

    def _index(self, slots_np: np.ndarray) -> np.ndarray:
        """Return the place in a batch of each request of the payload, NO_ROW if it has none."""
        row_N = np.full(len(self.states.open_N), NO_ROW, dtype=np.int64)
        row_N[slots_np] = np.arange(len(slots_np))
        return row_N[self.slots_np]

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
        device = self.states.device
        staged = np.stack([owner_np, self.payload.place_X[keep_np]])
        row_X, place_X = async_tensor_h2d(staged, device=device)
        allowed_np = self.payload.allowed_XW[keep_np]
        return row_X, place_X, async_tensor_h2d(allowed_np, device=device)

    def _decisions(self, slots_np: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return row, settled count and forced id of the step's requests, on the device."""
        payload = self.payload
        assert payload is not None
        row_np = self._index(slots_np)
        columns = np.stack([row_np, payload.settled_G, payload.forced_G])
        staged = columns[:, row_np != NO_ROW]
        row_G, settled_G, forced_G = async_tensor_h2d(staged, device=self.states.device)
        return row_G, settled_G, forced_G
