"""Find the logits rows of whole canvases: block-causal attention.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N slots.

A side stream (:class:`SideStream`) overlaps with the forward what a step does before it needs
logits. All of it is known once the step before has decided. It is some twenty small kernels, which
take 1 % of a step if they wait for the forward, and no time if they run while it does. They may
write nothing that the forward reads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.decoding.causal_rows import row_of_position
from dllm_plugin.decoding.plan import StepPlan
from dllm_plugin.kernels.move_rows import move_rows, move_rows_reference
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases
from dllm_plugin.state.refreshed import positions_of_rows

from .rows import RowChunk, take_rows
from .step import LogitsRows, Planned, Step, StepTensors, allow_any_length

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class SideStream:
    """Run work on one CUDA stream of the owner's; on CPUs, in place.

    The tensors that the work makes may be read until the end of its step. Their memory comes from
    the stream's own pool, and is used again in a later step, after everything that the main stream
    held when that step began.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        self._may_start: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Record the start of the work: all that it reads is queued on the main stream."""
        if self._stream is not None:
            self._may_start = torch.cuda.Event()
            self._may_start.record()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Queue work after the last mark, or after everything if there is none since the last run.

        What the main stream is given afterwards waits for the results.
        """
        if self._stream is None:
            yield
            return
        if self._may_start is None:
            self.mark()
        assert self._may_start is not None
        self._stream.wait_event(self._may_start)
        self._may_start = None
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


WARMUP_PREFIX = "_warmup_"


class CarryUpdate(NamedTuple):
    """List the rows of this forward that become carry rows: `from_R` int64, if `moved_R`."""

    logits_TV: Tensor
    from_R: Tensor
    slots_R: Tensor
    moved_R: Tensor


class CanvasRows(LogitsRows):
    """Find the rows of all computed canvas positions: nothing has to be known before the forward.

    With shifted logits one row is missing, that of the last committed position. It is kept, as the
    *carry row* of the slot, from the forward that committed the position. If a finished block
    commits in a forward of its own no row is kept: it has decided its position by then, see
    :mod:`dllm_plugin.sampling.features.first_token`.
    """

    def __init__(self, states: CanvasStates, dtype: torch.dtype, width: int) -> None:
        """Make the carry rows; `dtype` and `width` are those of the logits."""
        super().__init__(states)
        self.begin: Callable[..., tuple[Planned, Tensor, Tensor]] = self.begin_step
        self._update: CarryUpdate | None = None
        self._mixed = False
        self.side_stream = SideStream(states.device)
        self.dedicated_commit = states.config.dedicated_commit
        self.causal_commit = self.method.causal_commit
        # Rows of causal forwards propose the token after them in any case.
        self.reads_last_row = self.dedicated_commit and not self.method.causal
        if self.shift and not self.dedicated_commit:
            shape = (len(states.canvas_NC), width)
            self.carry_NV = torch.zeros(shape, dtype=dtype, device=states.device)

    def warm_up(self, logits_XV: Tensor, carry_NV: Tensor | None) -> None:
        """Launch the kernel that stores carry rows; none moves."""
        if carry_NV is not None:
            zero_R = torch.zeros(2, dtype=torch.int64, device=carry_NV.device)
            move_rows(logits_XV, zero_R, carry_NV, zero_R, zero_R > 0)

    def choose(self, batch: "InputBatch", mixed: bool) -> None:
        """Ask for the last row of each prefill, too, if it predicts the next token.

        Args:
            mixed: requests of the step differ in how their rows are read.
        """
        self.side_stream.mark()
        self._mixed = mixed
        canvases = count_canvases(batch)
        next_tokens = self.shift or self.causal_commit
        if not next_tokens or not batch.is_prefilling_np[canvases:].any():
            return
        # vLLM's warm-up hands a grammar to its prefills and expects them to have no rows.
        # Ids of clients end in what vLLM appends to them, never in "_".
        first_id = batch.req_ids[0]
        if first_id.startswith(WARMUP_PREFIX) and first_id.endswith("_"):
            return
        last = batch.query_start_loc[canvases + 1 : batch.num_reqs + 1] - 1
        batch.logits_indices = torch.cat([batch.logits_indices, last.to(torch.int64)])

    def read(self, logits_TV: Tensor, batch: "InputBatch") -> Step | None:
        """Return the rows of the canvases, or None without canvases; keep those of prefills.

        Shifted logits hold one row for each prefill after those of the canvases.
        """
        canvases = count_canvases(batch)
        num_rows = batch.num_draft_tokens
        if self.carry_NV is not None and num_rows < logits_TV.shape[0]:
            prefilled = batch.idx_mapping[canvases : batch.num_reqs]
            # Warm-up batches have rows that no prefill asked for.
            if len(prefilled) == logits_TV.shape[0] - num_rows:
                rows_RV = logits_TV[num_rows:].to(self.carry_NV.dtype)
                self.carry_NV[prefilled] = rows_RV
        if not canvases:
            return None
        with self.side_stream.run():
            return self._planned_step(logits_TV[:num_rows], batch, canvases)

    def _planned_step(
        self, logits_TV: Tensor, batch: "InputBatch", canvases: int
    ) -> Step:
        """Return all of a step but what its logits say; read nothing that this forward writes."""
        slots_R = batch.idx_mapping[:canvases]
        bounds = batch.cu_num_logits
        low_R = bounds[:canvases]
        high_R = bounds[1 : canvases + 1]
        planned, last_row_R, commits_R = self.begin(slots_R, low_R, high_R)
        num_rows = len(logits_TV)
        if self.carry_NV is not None:
            num_rows += canvases
            self._update = CarryUpdate(logits_TV, last_row_R, slots_R, commits_R)
        step = Step(slots_R, *planned, batch.seq_lens[:canvases], None)
        step.last_row_R = last_row_R if self.reads_last_row else None
        step.index_R = self.states.number_X[:canvases]
        step.index_np = np.arange(canvases)
        step.slots_np = batch.idx_mapping_np[:canvases]
        step.before_np = batch.num_computed_tokens_np[:canvases]
        # Compiled code serves any number of rows but one, which torch would compile anew.
        step.num_reqs = batch.num_reqs
        step.num_rows = max(num_rows, 2)
        step.chunks = self._chunks(step, logits_TV, batch)
        return step

    def example(self, count: int) -> StepTensors:
        """Return a made-up step of some slots with two rows each, with tensors as in `read`."""
        device = self.states.device
        num_slots = len(self.states.open_N)
        slots_R = torch.arange(count, device=device) % num_slots
        bounds = 2 * torch.arange(count + 1, dtype=torch.int32, device=device)
        low_R, high_R = bounds[:count], bounds[1 : count + 1]
        allow_any_length(slots_R, low_R, high_R)
        planned, _, _ = self.begin(slots_R, low_R, high_R)
        with torch.inference_mode(False):
            # As vLLM's buffer, which it makes before any step: another kind of tensor to compilers.
            seq_lens_R = torch.zeros(count, dtype=torch.int32, device=device)
        return StepTensors(slots_R, *planned, seq_lens_R, None)

    def begin_step(
        self, slots_R: Tensor, low_R: Tensor, high_R: Tensor
    ) -> tuple[Planned, Tensor, Tensor]:
        """View and plan the canvases whose rows of this forward are ``[low, high)``.

        Returns:
            the plan; int64 and bool ``[R]``, the row that may become the carry row, and whether it
            does.
        """
        low = low_R.to(torch.int64)
        high = high_R.to(torch.int64)
        drafts_R = high - low
        canvas, remaining_R = self.states.view(slots_R, drafts_R)
        plan = self.plan(canvas, self.mask_id)
        position_C = torch.arange(self.num_positions, device=slots_R.device)
        shift: int | Tensor = self.shift
        if self.causal_commit:
            shift = self._shifts(plan)[:, None]
        order_RC = (position_C - shift).clamp_min(0)
        if self.method.reorders:
            order_RC = row_of_position(canvas.tokens_RC, self.mask_id)
        # Positions that were not computed share the last row.
        source_RC = torch.minimum(low[:, None] + order_RC, high[:, None] - 1)
        if self.carry_NV is not None:
            # The carry rows stand after the rows of this forward.
            carry_R = high_R[-1] + torch.arange(len(slots_R), device=slots_R.device)
            source_RC = torch.where(position_C == 0, carry_R[:, None], source_RC)
        last_row_R = low_R + plan.num_committed_R.clamp_min(1).to(torch.int64) - 1
        commits_R = plan.num_committed_R > 0
        planned = Planned(canvas, plan, source_RC, remaining_R, drafts_R)
        return planned, last_row_R, commits_R

    def _shifts(self, plan: StepPlan) -> Tensor:
        """Return how far after its row a predicted position is, int64 ``[R]``.

        It is 1 in causal forwards, which store a block, and else 0.
        """
        return (plan.num_stored_R > 0).to(torch.int64)

    def has_row(self, step: Step) -> Tensor:
        """Return the positions that a row of this step predicts, bool ``[R, C]``."""
        has_row_RC = self.states.position_C < step.drafts_R[:, None]
        if self.method.reorders:
            # The row of a decided position predicts nothing there.
            has_row_RC &= step.canvas.tokens_RC == self.mask_id
        return has_row_RC

    def replan(self, step: Step, plan: StepPlan) -> None:
        """Replace the plan of a step; the row that is stored or read after it moves along."""
        committed_R = plan.num_committed_R.clamp_min(1)
        moved_R = committed_R - step.plan.num_committed_R.clamp_min(1)
        if self._update is not None:
            from_R = self._update.from_R + moved_R
            moves_R = plan.num_committed_R > 0
            self._update = self._update._replace(from_R=from_R, moved_R=moves_R)
        if step.last_row_R is not None:
            step.last_row_R = step.last_row_R + moved_R
        step.plan = plan

    def keep_carry_rows(self) -> None:
        """Store the row of the last position that commits in this step, after carry rows were read.

        It serves the next steps.
        """
        update, self._update = self._update, None
        if update is not None:
            assert self.carry_NV is not None
            logits_TV, from_R, slots_R, moved_R = update
            move = move_rows if self.carry_NV.is_cuda else move_rows_reference
            move(logits_TV, from_R, self.carry_NV, slots_R, moved_R)

    def _chunks(
        self, step: Step, logits_TV: Tensor, batch: "InputBatch"
    ) -> list[RowChunk]:
        """Return the rows to propose from: those of this forward, then the carry rows."""
        device = self.states.device
        slots_R = step.slots_R
        plan = step.plan
        slot_T = batch.expanded_idx_mapping
        offset_T = batch.expanded_local_pos
        count, num_rows = len(slots_R), len(slot_T)
        if self.method.reorders:
            # Not `batch.positions`: the main stream may still have to write these.
            offset_T = positions_of_rows(batch, self.states)
        if self.causal_commit:
            shifts_R = self._shifts(plan)
            drafts_R = step.drafts_R
            shifts_T = shifts_R.repeat_interleave(drafts_R, output_size=num_rows)
            offset_T = offset_T + shifts_T.to(offset_T.dtype)
        owner_np = owner_R = None
        if self._mixed:
            owner_R = step.index_np
            drafts = batch.num_draft_tokens_per_req
            assert drafts is not None
            owner_np = np.repeat(owner_R, drafts[:count])
        computed = RowChunk(
            self.states.number_X[:num_rows],
            logits_TV,
            slot_T,
            offset_T,
            shift=self.shift,
            owner_np=owner_np,
        )
        chunks = [computed]
        if self.carry_NV is not None:
            carry = RowChunk(
                self.states.number_X[num_rows : num_rows + count],
                self.carry_NV,
                slots_R,
                torch.zeros_like(slots_R, dtype=torch.int32),
                slots_R,
                owner_np=owner_R,
            )
            chunks.append(carry)
        if device.type != "cpu":
            return chunks
        # There is no device to wait for, so rows that propose for nothing are left out.
        wanted = step.source_RC[plan.candidates_RC | plan.editable_RC]
        needed = []
        for chunk in chunks:
            chosen = torch.isin(chunk.rows_T, wanted).nonzero().squeeze(1)
            taken = take_rows(chunk, chosen)
            owner_np = chunk.owner_np
            if owner_np is not None:
                taken = taken._replace(owner_np=owner_np[chosen.numpy()])
            needed.append(taken)
        return needed
