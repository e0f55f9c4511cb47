"""Which hidden states become logits, and which canvas position each row predicts.

Two siblings with one interface: ``request`` runs before the forward and may change the rows that
vLLM reads, ``read`` runs behind it. Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.methods import PlanFunction
from dllm_plugin.decoding.plan import Canvas, StepPlan
from dllm_plugin.kernels.move_rows import kernel as move_rows
from dllm_plugin.kernels.move_rows import reference
from dllm_plugin.sampling.compilation import of_any_length
from dllm_plugin.sampling.guidance import GuidedRows, context_rows, pair_rows
from dllm_plugin.sampling.side_stream import Beside
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

# Rows sampled at once where a step needs float32 copies of the logits.
CHUNK_ROWS = 256
WARMUP_PREFIX = "_warmup_"


class RowChunk(NamedTuple):
    """Some logits rows of a step.

    rows_T int64, index among all rows of the step; logits_XV model dtype; source_T int, which
    rows of it these are, None if all of them in order; slot_T int; offset_T int, added with
    `shift` to the start of its slot's canvas: the position that a row predicts.
    """

    rows_T: Tensor
    logits_XV: Tensor
    source_T: Tensor | None
    slot_T: Tensor
    offset_T: Tensor
    shift: int


class CarryMove(NamedTuple):
    """Rows of this forward that become carry rows: from_R int64 row, where moved_R says so."""

    logits_TV: Tensor
    from_R: Tensor
    slots_R: Tensor
    moved_R: Tensor


# slots_R, canvas, plan, source_RC, remaining_R, drafts_R, seq_lens_R of :class:`StepRows`.
StepTensors = tuple[Tensor, Canvas, StepPlan, Tensor, Tensor, Tensor, Tensor]


class StepRows(NamedTuple):
    """One step of the requests that decide something.

    index_R int64, their place in the batch; slots_R int64, slots_np the same on the host;
    source_RC int64, row of each canvas position; num_rows, all values that source_RC can have;
    drafts_R int64, canvas positions of each request in this batch; seq_lens_R int32, keys of each
    request behind it; last_row_R int64, last logits row of what is stored, where it leads the next
    block.
    """

    index_R: Tensor
    slots_R: Tensor
    slots_np: np.ndarray
    canvas: Canvas
    remaining_R: Tensor
    plan: StepPlan
    source_RC: Tensor
    num_rows: int
    chunks: list[RowChunk]
    drafts_R: Tensor
    seq_lens_R: Tensor
    last_row_R: Tensor | None = None

    def tensors(self) -> StepTensors:
        """What of it changes nothing but its length from step to step."""
        sizes = (self.remaining_R, self.drafts_R, self.seq_lens_R)
        return (self.slots_R, self.canvas, self.plan, self.source_RC, *sizes)


class Begun(NamedTuple):
    """What is known of a step's canvases from the state before it, see :class:`StepRows`.

    moved_R bool, the row `last_row_R` becomes the carry row.
    """

    canvas: Canvas
    remaining_R: Tensor
    plan: StepPlan
    source_RC: Tensor
    drafts_R: Tensor
    last_row_R: Tensor
    moved_R: Tensor


class CanvasRows:
    """All fed positions of every canvas: nothing has to be known before the forward.

    With shifted logits one row is missing, that of the last committed position, which is kept as
    the *carry row* from the pass that committed it. Where blocks commit alone that row has decided
    its position by then (:mod:`dllm_plugin.sampling.first_token`).
    """

    def __init__(
        self, states: CanvasStates, dtype: torch.dtype, width: int, plan: PlanFunction
    ) -> None:
        """`dtype` and `width` of the logits."""
        self.states = states
        self.plan = plan
        self.begin: Callable[[Tensor, Tensor, Tensor], Begun] = self.begin_step
        self.carry_NV: Tensor | None = None
        self._move: CarryMove | None = None
        self.beside = Beside(states.device)
        num_slots, self.num_positions = states.canvas_NC.shape
        self.shift = int(states.config.family.logits_shift)
        self.dedicated_commit = states.config.dedicated_commit
        if self.shift and not self.dedicated_commit:
            self.carry_NV = torch.zeros(num_slots, width, dtype=dtype, device=states.device)

    def request(self, batch: "InputBatch") -> None:
        """Ask for the last row of each prefill when logits are shifted."""
        self.beside.mark()
        canvases = count_canvases(batch)
        if not self.shift or not batch.is_prefilling_np[canvases:].any():
            return
        # vLLM's warm-up hands a grammar to its prefills and expects them to have no rows.
        # Ids of clients end in what vLLM appends to them, never in "_".
        if batch.req_ids[0].startswith(WARMUP_PREFIX) and batch.req_ids[0].endswith("_"):
            return
        last = batch.query_start_loc[canvases + 1 : batch.num_reqs + 1] - 1
        batch.logits_indices = torch.cat([batch.logits_indices, last.to(torch.int64)])

    def read(self, logits_TV: Tensor, batch: "InputBatch") -> StepRows | None:
        """The step's rows, of the canvases and then (shifted) one per prefill; None if empty."""
        canvases, num_rows = count_canvases(batch), batch.num_draft_tokens
        if self.carry_NV is not None and num_rows < logits_TV.shape[0]:
            prefilled = batch.idx_mapping[canvases : batch.num_reqs]
            # Warm-up batches bring rows that no prefill asked for.
            if len(prefilled) == logits_TV.shape[0] - num_rows:
                self.carry_NV[prefilled] = logits_TV[num_rows:].to(self.carry_NV.dtype)
        if not canvases:
            return None
        with self.beside.run():
            return self._known(logits_TV[:num_rows], batch, canvases)

    def _known(self, logits_TV: Tensor, batch: "InputBatch", canvases: int) -> StepRows:
        """All of a step but what its logits say; it reads nothing that this forward writes."""
        slots_R, bounds = batch.idx_mapping[:canvases], batch.cu_num_logits
        begun = self.begin(slots_R, bounds[:canvases], bounds[1 : canvases + 1])
        return StepRows(
            torch.arange(canvases, device=self.states.device),
            slots_R,
            batch.idx_mapping_np[:canvases],
            begun.canvas,
            begun.remaining_R,
            begun.plan,
            begun.source_RC,
            len(logits_TV) + (0 if self.carry_NV is None else canvases),
            list(self._chunks(logits_TV, batch, slots_R, begun)),
            begun.drafts_R,
            batch.seq_lens[:canvases],
            begun.last_row_R if self.dedicated_commit else None,
        )

    def example(self, count: int) -> StepTensors:
        """A step of some slots with two rows each, as `read` finds it."""
        device = self.states.device
        slots_R = torch.arange(count, device=device) % len(self.states.open_N)
        bounds = 2 * torch.arange(count + 1, dtype=torch.int32, device=device)
        low_R, high_R = bounds[:count], bounds[1 : count + 1]
        of_any_length(slots_R, low_R, high_R)
        begun = self.begin(slots_R, low_R, high_R)
        with torch.inference_mode(False):
            # As vLLM's buffer, which it makes before any step: another kind of tensor to compilers.
            seq_lens_R = torch.zeros(count, dtype=torch.int32, device=device)
        sizes = (begun.remaining_R, begun.drafts_R, seq_lens_R)
        return (slots_R, begun.canvas, begun.plan, begun.source_RC, *sizes)

    def begin_step(self, slots_R: Tensor, low_R: Tensor, high_R: Tensor) -> Begun:
        """View and plan the canvases whose rows of this forward are ``[low, high)``."""
        drafts_R = (high_R - low_R).to(torch.int64)
        canvas, remaining_R = self.states.view(slots_R, drafts_R)
        plan = self.plan(canvas, self.states.config.mask_token_id)
        position_C = torch.arange(self.num_positions, device=slots_R.device)
        source_RC = low_R.to(torch.int64)[:, None] + (position_C - self.shift).clamp_min(0)
        # Clamped behind the span.
        source_RC = torch.minimum(source_RC, high_R.to(torch.int64)[:, None] - 1)
        if self.carry_NV is not None:
            # The carry rows stand behind the rows of this forward.
            carry_R1 = (high_R[-1] + torch.arange(len(slots_R), device=slots_R.device))[:, None]
            source_RC = torch.where(position_C == 0, carry_R1, source_RC)
        # The row of the last position that commits now serves the next steps.
        last_row_R = low_R + plan.num_committed_R.clamp_min(1).to(torch.int64) - 1
        moved_R = plan.num_committed_R > 0
        return Begun(canvas, remaining_R, plan, source_RC, drafts_R, last_row_R, moved_R)

    def keep_carries(self) -> None:
        """After the proposals: keep the row of the last position that commits in this step."""
        move, self._move = self._move, None
        if move is not None:
            assert self.carry_NV is not None
            module = move_rows if self.carry_NV.is_cuda else reference
            module.move_rows(move.logits_TV, move.from_R, self.carry_NV, *move[2:])

    def _chunks(
        self,
        logits_TV: Tensor,
        batch: "InputBatch",
        slots_R: Tensor,
        begun: Begun,
    ) -> Iterator[RowChunk]:
        """The rows to propose from: those of this forward, then the carry rows."""
        states = self.states
        slot_T, offset_T = batch.expanded_idx_mapping, batch.expanded_local_pos
        parts: list[tuple[Tensor, Tensor | None, Tensor, Tensor, int]] = [
            (logits_TV, None, slot_T, offset_T, self.shift)
        ]
        if self.carry_NV is not None:
            self._move = CarryMove(logits_TV, begun.last_row_R, slots_R, begun.moved_R)
            nowhere_R = torch.zeros_like(slots_R, dtype=torch.int32)
            parts.append((self.carry_NV, slots_R, slots_R, nowhere_R, 0))
        first = 0
        for logits, source, slots, offsets, shift in parts:
            rows = torch.arange(first, first + len(slots), device=states.device)
            first += len(slots)
            if states.device.type == "cpu":
                # There is no device to wait for, so rows that propose for nothing are left out.
                wanted_RC = begun.plan.candidates_RC | begun.plan.editable_RC
                chosen = torch.isin(rows, begun.source_RC[wanted_RC]).nonzero().squeeze(1)
                rows, slots, offsets = rows[chosen], slots[chosen], offsets[chosen]
                source = chosen if source is None else source[chosen]
            yield RowChunk(rows, logits, source, slots, offsets, shift)


class MaskedRows:
    """The masked positions of each current block and nothing else: for full attention.

    How many they are is read from the device before the forward. That waits for nothing: the
    scheduler has already waited for the step before, and only input preparation is queued.
    """

    def __init__(
        self, states: CanvasStates, dtype: torch.dtype, width: int, plan: PlanFunction
    ) -> None:
        self.states = states
        self.plan = plan
        self.shift = int(states.config.family.logits_shift)
        self._step: StepRows | None = None
        self._guided: GuidedRows | None = None

    def request(self, batch: "InputBatch") -> None:
        """Ask for the rows of this step; with guidance, for the same ones of each partner."""
        self._step = self._guided = None
        canvases = count_canvases(batch)
        if not canvases:
            return
        states = self.states
        guided = states.uses("cfg_scale", batch.idx_mapping_np[:canvases])
        index_np = partner_np = np.arange(canvases)
        if guided:
            index_np, partner_np = pair_rows(batch.req_ids[:canvases])
        index_R, partner_R = async_tensor_h2d(
            np.stack([index_np, partner_np]), device=states.device
        )
        slots_R, slots_np = batch.idx_mapping[index_R], batch.idx_mapping_np[index_np]
        drafts_R = batch.cu_num_logits[: canvases + 1].diff().to(torch.int64)
        canvas_drafts_R = drafts_R[index_R]
        canvas, remaining_R = states.view(slots_R, canvas_drafts_R)
        plan = self.plan(canvas, states.config.mask_token_id)
        request_T, place_T = plan.candidates_RC.nonzero(as_tuple=True)
        ends = batch.query_start_loc[1 : canvases + 1].to(torch.int64)
        first_row = ends - drafts_R - self.shift
        rows = [first_row[index_R][request_T] + place_T]
        guided_T = states.number("cfg_scale", slots_R)[request_T] > 0
        if guided:
            rows.append((first_row[partner_R][request_T] + place_T)[guided_T])
            self._hide_context(batch, partner_np[partner_np != index_np])
        batch.logits_indices = torch.cat(rows)
        num_rows = len(request_T)
        # Positions without a row of their own share one behind the last.
        source_RC = torch.full_like(canvas.block_RC, num_rows)
        source_RC[request_T, place_T] = torch.arange(num_rows, device=states.device)
        slot_T = slots_R[request_T]
        chunk = RowChunk(
            torch.arange(num_rows, device=states.device),
            states.canvas_NC.new_empty(num_rows, 0),
            None,
            slot_T,
            place_T.to(torch.int32),
            0,
        )
        if len(rows) > 1:
            self._guided = GuidedRows(guided_T, states.number("cfg_scale", slot_T)[guided_T])
        self._step = StepRows(
            index_R,
            slots_R,
            slots_np,
            canvas,
            remaining_R,
            plan,
            source_RC,
            num_rows + 1,
            [chunk],
            canvas_drafts_R,
            batch.seq_lens[index_R],
        )

    def _hide_context(self, batch: "InputBatch", partners: np.ndarray) -> None:
        """Feed masks to partners where the requests that they belong to have their context."""
        assert batch.num_draft_tokens_per_req is not None
        reached = batch.query_start_loc_np[partners + 1] - batch.query_start_loc_np[partners]
        starts = reached - batch.num_draft_tokens_per_req[partners]
        slots = batch.idx_mapping_np[partners]
        first = self.states.bounds_np(slots, starts.astype(np.int64)).first
        rows = context_rows(batch.query_start_loc_np, partners, first)
        batch.input_ids[torch.from_numpy(rows).to(self.states.device)] = (
            self.states.config.mask_token_id
        )

    def read(self, logits_TV: Tensor, batch: "InputBatch") -> StepRows | None:
        """The rows asked for by `request`; None if there were none."""
        step, self._step = self._step, None
        if step is None:
            return None
        if self._guided is not None:
            logits_TV = self._guided.combine(logits_TV, len(step.chunks[0].rows_T))
        return step._replace(chunks=[step.chunks[0]._replace(logits_XV=logits_TV)])

    def keep_carries(self) -> None:
        """Nothing: a refresh computes the row that a shifted model needs."""


def at_rows(parts: Sequence[Tensor], rows: Sequence[Tensor], num_rows: int) -> Tensor:
    """Scatter per-chunk values to ``[num_rows, ...]``; rows of no chunk are zero."""
    values, index_T = torch.cat(list(parts)), torch.cat(list(rows))
    return values.new_zeros(num_rows, *values.shape[1:]).index_copy_(0, index_T, values)


def split(chunk: RowChunk) -> Iterator[RowChunk]:
    """Cut rows into chunks of at most CHUNK_ROWS; no rows make one empty chunk."""
    rows_T, logits_XV, source_T, slot_T, offset_T, shift = chunk
    for low in range(0, max(len(rows_T), 1), CHUNK_ROWS):
        part = slice(low, low + CHUNK_ROWS)
        logits, source = (
            (logits_XV[part], None) if source_T is None else (logits_XV, source_T[part])
        )
        yield RowChunk(rows_T[part], logits, source, slot_T[part], offset_T[part], shift)
