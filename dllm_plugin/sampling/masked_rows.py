"""Find the logits rows of masked positions: full attention.

Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.methods import PlanFunction
from dllm_plugin.decoding.plan import StepPlan
from dllm_plugin.sampling.guidance import GuidedRows, context_rows, pair_requests
from dllm_plugin.sampling.rows import RowChunk, StepRows
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class MaskedRows:
    """Find the rows of the masked positions of each current block: no other ones become logits.

    How many they are is read from the device before the forward. That waits for nothing: the
    scheduler has already waited for the step before, and only input preparation is queued.
    """

    def __init__(
        self, states: CanvasStates, dtype: torch.dtype, width: int, plan: PlanFunction
    ) -> None:
        """Take the arguments of CanvasRows; no logits are kept here."""
        self.states = states
        self.plan = plan
        self.shift = int(states.config.family.logits_shift)
        self._step: StepRows | None = None
        self._guided: GuidedRows | None = None

    def choose(self, batch: "InputBatch", mixed: bool) -> None:
        """Ask for the rows of this step; with guidance, for those of unconditional requests, too.

        The rows of unconditional requests stand after all others.

        Args:
            mixed: requests of the step differ in how their rows are read: whose they are is read
                from the device, too.
        """
        self._step = self._guided = None
        canvases = count_canvases(batch)
        if not canvases:
            return
        states = self.states
        is_guided = states.requests.uses("cfg_scale", batch.idx_mapping_np[:canvases])
        index_np = unconditional_np = np.arange(canvases)
        if is_guided:
            index_np, unconditional_np = pair_requests(batch.req_ids[:canvases])
        refresh_np = self._next_refresh(batch, index_np)
        known = [index_np, unconditional_np, *([] if refresh_np is None else [refresh_np])]
        index_R, unconditional_R, *refresh = async_tensor_h2d(np.stack(known), device=states.device)
        slots_R = batch.idx_mapping[index_R]
        drafts_R = batch.cu_num_logits[: canvases + 1].diff().to(torch.int64)
        canvas_drafts_R = drafts_R[index_R]
        canvas, remaining_R = states.view(slots_R, canvas_drafts_R)
        plan = self.plan(canvas, states.config.mask_token_id)
        request_T, place_T = plan.candidates_RC.nonzero(as_tuple=True)
        ends = batch.query_start_loc[1 : canvases + 1].to(torch.int64)
        first_row = ends - drafts_R - self.shift
        rows = [first_row[index_R][request_T] + place_T]
        if is_guided:
            scale_T = states.requests.number("cfg_scale", slots_R)[request_T]
            guided_T = scale_T > 0
            rows.append((first_row[unconditional_R][request_T] + place_T)[guided_T])
            self._guided = GuidedRows(guided_T, scale_T[guided_T])
            self._hide_context(batch, unconditional_np[unconditional_np != index_np])
        batch.logits_indices = torch.cat(rows)
        # Positions without a row of their own share one after the last.
        num_rows = len(request_T)
        source_RC = torch.full_like(canvas.block_RC, num_rows)
        source_RC[request_T, place_T] = torch.arange(num_rows, device=states.device)
        chunk = self._without_logits(slots_R[request_T], place_T)
        if mixed:
            chunk = chunk._replace(owner_np=request_T.cpu().numpy())
        self._step = StepRows(
            index_R,
            index_np,
            slots_R,
            batch.idx_mapping_np[index_np],
            canvas,
            remaining_R,
            plan,
            source_RC,
            num_rows + 1,
            [chunk],
            canvas_drafts_R,
            batch.seq_lens[index_R],
            refresh_R=refresh[0] if refresh else None,
        )

    def _next_refresh(self, batch: "InputBatch", index: np.ndarray) -> np.ndarray | None:
        """Return where refreshes start once the current blocks are done; None: all at 0."""
        slots, drafts = batch.idx_mapping_np[index], batch.num_draft_tokens_per_req
        if drafts is None or self.states.requests.refresh_all(slots):
            return None
        queries = np.diff(batch.query_start_loc_np)[index]
        starts = batch.num_computed_tokens_np[index].astype(np.int64) + queries - drafts[index]
        return self.states.next_refresh_np(slots, starts)

    def _without_logits(self, slot_T: Tensor, place_T: Tensor) -> RowChunk:
        """Return the rows of a step as one chunk that `read` gives its logits."""
        rows_T = torch.arange(len(slot_T), device=slot_T.device)
        nothing_T0 = self.states.canvas_NC.new_empty(len(slot_T), 0)
        return RowChunk(rows_T, nothing_T0, None, slot_T, place_T.to(torch.int32), 0)

    def _hide_context(self, batch: "InputBatch", unconditional: np.ndarray) -> None:
        """Put masks into unconditional requests where the conditional ones have their context."""
        assert batch.num_draft_tokens_per_req is not None
        bounds_np = batch.query_start_loc_np
        reached = bounds_np[unconditional + 1] - bounds_np[unconditional]
        starts = reached - batch.num_draft_tokens_per_req[unconditional]
        slots = batch.idx_mapping_np[unconditional]
        first = self.states.bounds_np(slots, starts.astype(np.int64)).first
        rows = context_rows(bounds_np, unconditional, first)
        batch.input_ids[torch.from_numpy(rows).to(self.states.device)] = (
            self.states.config.mask_token_id
        )

    def read(self, logits_TV: Tensor, batch: "InputBatch") -> StepRows | None:
        """Return the rows that `choose` asked for; None if there were none."""
        step, self._step = self._step, None
        if step is None:
            return None
        if self._guided is not None:
            logits_TV = self._guided.combine(logits_TV, len(step.chunks[0].rows_T))
        return step._replace(chunks=[step.chunks[0]._replace(logits_XV=logits_TV)])

    def has_row(self, step: StepRows) -> Tensor:
        """Return the positions that a row of this step predicts, bool ``[R, C]``."""
        return step.source_RC < step.num_rows - 1

    def gather(self, step: StepRows, logits_TV: Tensor, row_G: Tensor, slot_G: Tensor) -> Tensor:
        """Return some rows of the step, ``[G, V]``, guided ones as they are combined."""
        rows_TV = step.chunks[0].logits_XV
        return rows_TV[row_G.clamp_max(len(rows_TV) - 1)]

    def replan(self, step: StepRows, plan: StepPlan) -> StepRows:
        """Return the step with another plan."""
        return step._replace(plan=plan)

    def keep_carry_rows(self) -> None:
        """Do nothing: a refresh computes the row that a shifted model needs."""
