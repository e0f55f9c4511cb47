"""Find the logits rows of masked positions: full attention.

Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.full_attention import without_void
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases

from .guidance import GuidedRows, context_rows, pair_requests
from .mask_counts import MaskCounts
from .rows import RowChunk
from .step import LogitsRows, Planned, Step, StepTensors, allow_any_length

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch


KNOWN_TO_HOST = 8  # columns of the first argument of `MaskedRows.begin_step`


class BegunStep(NamedTuple):
    """List what is known of a step before its forward.

    planned    the plan
    index_R    int64, place in the batch of each request
    slots_R    int64, its slot
    refresh_R  int64, where its next refresh starts
    found_2X   int64 ``[2, R * C]``, canvas position of each masked position, counted within a
               request, and the row of the batch that predicts it
    """

    planned: Planned
    index_R: Tensor
    slots_R: Tensor
    refresh_R: Tensor
    found_2X: Tensor


class HostRows(NamedTuple):
    """List the rows of a step on the host: per request the upper bound of its masks.

    index_np          places in the batch of the requests that decide
    unconditional_np  places of what guides them, their own without guidance
    slots_np          their slots
    starts_np         first positions of their canvases
    request_T         whose row each is: place among the deciding requests
    packed            all that the device has to know, int64: see :meth:`MaskedRows.begin_step` of
                      each request, then of each row its place in `found_2X`, then its slot
    first_row         row of the batch that predicts the first canvas position, of each canvas
    """

    index_np: np.ndarray
    unconditional_np: np.ndarray
    slots_np: np.ndarray
    starts_np: np.ndarray
    request_T: np.ndarray
    packed: np.ndarray
    first_row: np.ndarray


class MaskedRows(LogitsRows):
    """Find the rows of the masked positions of each current block: no other rows become logits.

    The host does not know which they are, and how many only at most. Rows that it counted and
    nobody needs serve position 0; nothing reads what they propose.
    """

    def __init__(self, states: CanvasStates, steps_in_flight: int) -> None:
        """Make the counts; `steps_in_flight` as :class:`MaskCounts` takes it."""
        super().__init__(states)
        self.begin: Callable[[Tensor], BegunStep] = self.begin_step
        num_slots = len(states.canvas_NC)
        self.counts = MaskCounts(num_slots, steps_in_flight)
        self._step: Step | None = None
        self._guided: GuidedRows | None = None
        # Stands for logits before the forward.
        self._nothing_T0 = states.canvas_NC.new_empty(0, 0)

    def choose(self, batch: "InputBatch", mixed: bool) -> None:
        """Ask for the rows of this step; with guidance, for those of unconditional requests, too.

        The rows of unconditional requests stand after all others.

        Args:
            mixed: requests of the step differ in how their rows are read.
        """
        self._step = self._guided = None
        canvases = count_canvases(batch)
        if not canvases:
            return
        rows = self._lay_out(batch, canvases)
        states = self.states
        slots_np = rows.slots_np
        num_rows = len(rows.request_T)
        num_known = len(slots_np) * KNOWN_TO_HOST
        packed = async_tensor_h2d(rows.packed, device=states.device)
        sizes = (num_known, num_rows, num_rows)
        known, flat, slot_T = packed.split_with_sizes(sizes)
        begun = self.begin(known.view(-1, KNOWN_TO_HOST))
        place_T, row_T = begun.found_2X[:, flat].unbind()
        batch.logits_indices = row_T
        if states.requests.uses("cfg_scale", slots_np):
            batch.logits_indices = self._guide(batch, rows, row_T)
        # Not start plus canvas: vLLM's warm-up decodes a canvas that it does not put there.
        seq_lens_R = batch.seq_lens[begun.index_R]
        step = Step(begun.slots_R, *begun.planned, seq_lens_R, begun.refresh_R)
        step.index_R = begun.index_R
        step.index_np = rows.index_np
        step.slots_np = slots_np
        step.before_np = rows.starts_np
        step.num_reqs = batch.num_reqs
        step.num_rows = num_rows + 1
        # One chunk, which `read` gives its logits.
        chunk = RowChunk(
            states.number_X[:num_rows],
            self._nothing_T0,
            slot_T,
            place_T.to(torch.int32),
            owner_np=rows.request_T if mixed else None,
        )
        step.chunks = [chunk]
        self._step = step

    def _lay_out(self, batch: "InputBatch", canvases: int) -> HostRows:
        """Count rows; those of a request follow those of the request before it."""
        requests = self.states.requests
        drafts = batch.num_draft_tokens_per_req
        assert drafts is not None
        drafts = drafts[:canvases]
        slots = batch.idx_mapping_np[:canvases]
        bounds = batch.query_start_loc_np[: canvases + 1]
        # In front of a canvas lies what is computed before it, here or earlier.
        before = bounds[1:] - drafts
        computed = batch.num_computed_tokens_np[:canvases]
        starts = computed + (before - bounds[:-1])
        row = first_row = before - self.shift
        index = unconditional = np.arange(canvases)
        if requests.uses("cfg_scale", slots):
            index, unconditional = pair_requests(batch.req_ids[:canvases])
            slots, starts = slots[index], starts[index]
            drafts, row = drafts[index], first_row[index]
        sizes = np.minimum(requests.block_length.np[slots], drafts)
        most = self.counts.most(slots, starts, sizes)
        request = np.repeat(np.arange(len(index)), most)
        num_rows = len(request)
        num_known = len(index) * KNOWN_TO_HOST
        packed = np.empty(num_known + 2 * num_rows, dtype=np.int64)
        refresh: Any = 0
        if not requests.refresh_all(slots):
            refresh = self.states.next_refresh_np(slots, starts)
        offset = np.cumsum(most) - most
        known = (index, slots, starts, drafts, refresh, row, offset, num_rows)
        known_KR = packed[:num_known].reshape(-1, KNOWN_TO_HOST).T
        for column, values in zip(known_KR, known, strict=True):
            column[:] = values
        # Rows are numbered within a request, and requests by the positions of a canvas.
        shift = np.arange(len(index)) * self.num_positions - offset
        packed[num_known:-num_rows] = np.arange(num_rows) + shift[request]
        packed[-num_rows:] = slots[request]
        places = index, unconditional
        return HostRows(*places, slots, starts, request, packed, first_row)

    def begin_step(self, known_RK: Tensor) -> BegunStep:
        """View and plan blocks, and number their masked positions.

        Args:
            known_RK: what the host knows, int64: place in the batch, slot, where it takes the
                canvas to start, canvas positions of this forward, where the refresh after this
                block starts, row of the batch that predicts the first position, number of the
                request's first row, and number of all rows.
        """
        index_R, slots_R, start_R, drafts_R, refresh_R, *numbers = known_RK.unbind(1)
        first_row_R, offset_R, number_R = numbers
        canvas, remaining_R = self.states.view(slots_R, drafts_R)
        is_void_R = self.states.start_N[slots_R] != start_R
        plan = without_void(self.plan(canvas, self.mask_id), is_void_R)
        candidates_RC = plan.candidates_RC
        rank_RC = candidates_RC.cumsum(dim=1) - 1
        # Positions without a row of their own share one after the last.
        row_RC = offset_R[:, None] + rank_RC
        source_RC = torch.where(candidates_RC, row_RC, number_R[:, None])
        count = self.num_positions
        position_C = torch.arange(count, device=slots_R.device)
        padded = torch.nn.functional.pad(rank_RC, (0, 1))
        into_RC = torch.where(candidates_RC, rank_RC, count)
        place_RC = torch.zeros_like(padded)
        place_RC = place_RC.scatter(1, into_RC, position_C.expand_as(rank_RC))
        place_RC = place_RC[:, :count]
        row_RC = (first_row_R[:, None] + place_RC).clamp_min(0)
        planned = Planned(canvas, plan, source_RC, remaining_R, drafts_R.clone())
        found_2X = torch.stack([place_RC, row_RC]).flatten(1)
        index_R, slots_R = index_R.clone(), slots_R.clone()
        return BegunStep(planned, index_R, slots_R, refresh_R.clone(), found_2X)

    def example(self, count: int) -> StepTensors:
        """Return a made-up step of some slots, with tensors as in `choose`."""
        known = np.zeros((count, KNOWN_TO_HOST), dtype=np.int64)
        known[:, 1] = np.arange(count) % len(self.states.open_N)
        known[:, 3] = self.states.config.block_length
        device = self.states.device
        on_device = async_tensor_h2d(known.ravel(), device=device)
        known_RK = on_device.view(known.shape)
        allow_any_length(known_RK)
        begun = self.begin(known_RK)
        seq_lens_R = begun.index_R.new_zeros(count, dtype=torch.int32)
        slots_R, refresh_R = begun.slots_R, begun.refresh_R
        return StepTensors(slots_R, *begun.planned, seq_lens_R, refresh_R)

    def keep_counts(self, step: Step, left_R: Tensor | None) -> None:
        """Record how many masks the step has left in each block."""
        assert left_R is not None
        self.counts.record(step.slots_np, step.before_np, left_R)

    def _guide(self, batch: "InputBatch", rows: HostRows, row_T: Tensor) -> Tensor:
        """Return the rows of the step, then those of unconditional requests."""
        requests = self.states.requests
        slots_np = rows.slots_np
        scales = requests.users("cfg_scale", slots_np)
        place_G = np.flatnonzero(scales[rows.request_T])
        request_G = rows.request_T[place_G]
        hidden = rows.unconditional_np
        first_row = rows.first_row
        distance = first_row[hidden] - first_row[rows.index_np]
        known = place_G, distance[request_G], slots_np[request_G]
        packed = async_tensor_h2d(np.stack(known), device=row_T.device)
        place, distance_G, slot_G = packed
        scale_G = requests.number("cfg_scale", slot_G)
        self._guided = GuidedRows(place, scale_G)
        self._hide_context(batch, hidden[hidden != rows.index_np])
        return torch.cat([row_T, row_T[place] + distance_G])

    def _hide_context(self, batch: "InputBatch", unconditional: np.ndarray) -> None:
        """Mask in unconditional requests the context of the conditional requests."""
        bounds_np = batch.query_start_loc_np
        drafts = batch.num_draft_tokens_per_req
        assert drafts is not None
        reached = bounds_np[unconditional + 1] - bounds_np[unconditional]
        starts = (reached - drafts[unconditional]).astype(np.int64)
        slots = batch.idx_mapping_np[unconditional]
        first = self.states.bounds_np(slots, starts).first
        rows = context_rows(bounds_np, unconditional, first)
        rows_T = async_tensor_h2d(rows, device=self.states.device)
        batch.input_ids.index_fill_(0, rows_T, self.mask_id)

    def add_request(self, slot: int, params: "SamplingParams") -> None:
        """Store whether the masks of a slot's request may become more."""
        self.counts.grows_np[slot] = params.structured_outputs is not None

    def remove_request(self, slot: int) -> None:
        """Free a slot."""
        self.counts.forget(slot)

    def read(self, logits_TV: Tensor, batch: "InputBatch") -> Step | None:
        """Return the rows that `choose` asked for; None if there were none."""
        step, self._step = self._step, None
        if step is None:
            return None
        [chunk] = step.chunks
        if self._guided is not None:
            logits_TV = self._guided.combine(logits_TV, len(chunk.rows_T))
        step.chunks = [chunk._replace(logits_XV=logits_TV)]
        return step

    def has_row(self, step: Step) -> Tensor:
        """Return the positions that a row of this step predicts, bool ``[R, C]``."""
        return step.source_RC != len(step.chunks[0].rows_T)

    def num_columns(self, step: Step) -> int:
        """Return how many leading positions of canvases can have a row, as the host knows."""
        lengths_np = self.states.requests.block_length.np
        longest = int(lengths_np[step.slots_np].max())
        return min(longest, self.num_positions)
