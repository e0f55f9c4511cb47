"""Keep the canvas of every request slot between denoising steps.

Slots are the runner's request indices. The canvas tokens themselves live in the runner's
``req_states.draft_tokens``, where the next forward reads them. Shape letters as in
:mod:`dllm_plugin.decoding.plan`; N is the number of slots. Writers: `add_request` and
`apply_staged_writes` start a slot, `advance` moves it after a step, `FirstTokenDecoder.write`
decides its position 0, `copy_rows` mirrors guidance, `PreemptedRows` brings rows back.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.parsing import arguments_of
from dllm_plugin.config.worker_carriers import FINISHED, PREEMPTED, unpack_id
from dllm_plugin.decoding.blocks import leading
from dllm_plugin.decoding.full_attention import Bounds, bounds, refresh_start
from dllm_plugin.decoding.plan import Canvas, StepOutcome, StepPlan
from dllm_plugin.decoding.quotas import step_with_quota

from .floating import FloatingView
from .preempted import PreemptedRows
from .request_table import POLICY_IDS, RequestTable, Templates

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch

PREEMPTED_PER_SLOT = 16


def with_spare_row(canvas_NC: Tensor) -> Tensor:
    """Return a copy of canvases that are followed by one unused row."""
    # With a suffix longer than the canvas vLLM's kernel reads a row up to the next power of two.
    slots, positions = canvas_NC.shape
    room = canvas_NC.new_zeros(slots + 1, positions)
    room[:-1] = canvas_NC
    return room[:-1]


class CanvasStates:
    """Store the canvases: tensors with a row per slot, which steps move on the device.

    canvas_NC        int64, tokens from the first uncommitted position on, mask id if undecided
    open_N           int32, open blocks
    full_NS          bool, fully activated blocks
    saw_stop_N       bool, a stop token was unmasked
    ended_N          bool, the final text was emitted
    block_step_N     int32, denoising steps of the first unfinished block
    step_N           int64, denoising steps of the request: the counter of its random numbers
    start_N          int64, absolute position of canvas position 0
    tail_N           int32, leading canvas positions that belong to the prompt: never emitted
    post_step_N      int32, steps that the first block has had without masks and not committed
    cached_N         bool, every position of the first block has KV of this block's steps
    counter_N        `step_N`, or `block_step_N` if a preempted block is decoded again
    number_X         int64, the numbers from 0, as many as all rows: positions and carry rows
    position_C       int64, the canvas positions, for code that is not compiled
    """

    def __init__(
        self, config: DecodeConfig, model_config: ModelConfig, draft_tokens_NC: Tensor
    ) -> None:
        self.config, method = config, config.method
        self.canvas_NC = draft_tokens_NC
        self.device = draft_tokens_NC.device
        self.model_config = model_config
        num_slots, self.num_positions = draft_tokens_NC.shape
        self.mask_id = config.mask_token_id
        count = draft_tokens_NC.numel() + num_slots
        self.number_X = torch.arange(count, device=self.device)
        self.position_C = self.number_X[: self.num_positions]
        zeros = self.zeros
        self.start_N = zeros(torch.int64)
        self.ended_N = zeros(torch.bool)
        self.tail_N = zeros(torch.int32)
        self.open_N = zeros(torch.int32)
        self.full_NS = zeros(torch.bool, config.block_slots)
        self.saw_stop_N = zeros(torch.bool)
        self.block_step_N = zeros(torch.int32)
        self.step_N = zeros(torch.int64)
        self.post_step_N = zeros(torch.int32)
        self.cached_N = zeros(torch.bool)

        self.requests = RequestTable(config, num_slots, self.device)
        self.templates = Templates(self.canvas_NC)
        self.floating: FloatingView | None = None
        if method.floats:
            canvas = self.canvas_NC, self.start_N
            self.floating = FloatingView(config, *canvas, self.requests)
        self.counter_N = self.step_N
        if config.restarts_blocks:
            self.counter_N = self.block_step_N
        if method.verifies:
            # Random numbers by position only: a text does not depend on what was drafted.
            self.counter_N = torch.zeros_like(self.step_N)

        # Tables of other owners that move with the canvas: kept and restored like it.
        self.companions: list[Tensor] = []
        self.early_text_np = np.zeros(num_slots, dtype=np.bool_)
        self.req_id_to_slot: dict[str, int] = {}
        self._fresh: list[tuple[int, int, int]] = []
        self._given: list[tuple[int, int, int]] = []
        self.preempted = PreemptedRows(PREEMPTED_PER_SLOT * num_slots)

    def zeros(self, dtype: torch.dtype, *width: int) -> Tensor:
        """Return a table of zeros with a row per slot."""
        shape = (len(self.canvas_NC), *width)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def max_model_len(self) -> int:
        """Return the context; vLLM may lower it after start to fit the KV cache."""
        return self.model_config.max_model_len

    @property
    def _rows(self) -> tuple[Tensor, ...]:
        place = (self.start_N, self.ended_N, self.canvas_NC, self.tail_N)
        return (*place, *self._progress, *self.companions)

    @property
    def _progress(self) -> tuple[Tensor, ...]:
        """Return the tables of a block's progress, which a block begins at zero."""
        return (
            self.open_N,
            self.full_NS,
            self.saw_stop_N,
            self.block_step_N,
            self.step_N,
            self.post_step_N,
            self.cached_N,
        )

    def add_request(self, slot: int, data: "NewRequestData") -> None:
        """Start `slot` for a new request, or for a request that comes back from preemption."""
        params, req_id = data.sampling_params, data.req_id
        prompt, known = data.prompt_token_ids, data.prefill_token_ids
        assert params is not None and params.max_tokens is not None
        assert prompt is not None and known is not None
        asked = arguments_of(self.config, params)
        template, context = asked.template, self.max_model_len
        prompt_len, known_len = len(prompt), len(known)
        end = min(prompt_len + params.max_tokens, context)
        self.requests.fill(slot, prompt_len, end, asked, params, context)
        self.templates.add_request(slot, template, end)
        self.early_text_np[slot] = asked.early_text
        self.req_id_to_slot[str(req_id)] = slot
        # On an absolute grid the first block begins inside the prompt.
        absolute = self.config.family.absolute_grid
        if self.floating is not None:
            absolute = False
            ends = [prompt_len, *unpack_id(req_id)[1]]
            self.floating.pieces[slot] = np.array(ends, dtype=np.int64)
        tail = known_len % asked.block_length if absolute else 0
        start = known_len - tail
        self._fresh.append((slot, start, tail))
        tokens = known[start:]
        if template is not None:
            first = known_len - prompt_len
            last = first + self.num_positions
            tokens = list(template.token_ids[first:last])
        for place, token in enumerate(tokens):
            if token != FILL:
                self._given.append((slot, place, token))
        self.preempted.bring_back(req_id, slot)

    def remove_request(self, req_id: str) -> int | None:
        """Free and return the slot; a preempted request's open blocks are kept until it is back.

        It then takes the steps that it would have taken. Under full attention, and with the cache
        of a block, the KV that the open block was decided on is lost: it starts again, but for
        tokens that were sent already.
        """
        slot = self.req_id_to_slot.pop(req_id, None)
        why, _ = unpack_id(req_id)
        if why == FINISHED:
            self.preempted.forget(req_id)
        if slot is None:
            return None
        self.templates.forget(slot)
        if why != PREEMPTED:
            return slot
        restarts = self.config.method.full_attention
        restarts |= self.requests.uses("use_block_cache", np.array([slot]))
        if restarts and not self.early_text_np[slot]:
            return slot
        rows = tuple(table[slot].clone() for table in self._rows)
        if restarts:
            # The block starts anew, but its leading tokens stay: they were sent.
            start, ended, canvas, tail, *others = rows
            sent = (canvas != self.mask_id).cumprod(dim=0) > 0
            canvas, count = canvas.where(sent, self.mask_id), len(self._progress)
            progress = map(torch.zeros_like, others[:count])
            rows = start, ended, canvas, tail, *progress, *others[count:]
        self.preempted.keep(req_id, rows)
        return slot

    def apply_staged_writes(self) -> None:
        """Copy what `add_request` staged to the device."""
        self.requests.copy_to_device()
        if self._fresh:
            # Sleep mode may have taken it while no request was left.
            torch.arange(len(self.number_X), out=self.number_X)
            slots, starts, tails = self._upload(self._fresh)
            # An assigned number would come from host memory that is not pinned, and be waited for.
            for row in self._rows:
                row.index_fill_(0, slots, 0)
            self.start_N[slots] = starts
            self.tail_N[slots] = tails.to(torch.int32)
            self.canvas_NC.index_fill_(0, slots, self.mask_id)
        self.preempted.restore(self._rows)
        # Given tokens are given again after what was sent of a block.
        if self._given:
            slots, places, tokens = self._upload(self._given)
            self.canvas_NC[slots, places] = tokens
        self.templates.copy_to_device()

    def _upload(self, rows: list[tuple[int, int, int]]) -> tuple[Tensor, ...]:
        """Copy staged rows to the device, as columns, and clear them."""
        rows_np = np.array(rows, dtype=np.int64)
        rows.clear()
        return async_tensor_h2d(rows_np, device=self.device).unbind(1)

    def view(self, slots_R: Tensor, num_computed_R: Tensor) -> tuple[Canvas, Tensor]:
        """Gather the canvases of a step.

        Args:
            slots_R: int64, slot of each request that has a canvas in this step.
            num_computed_R: int64, canvas positions of each request in this forward.
        Returns:
            the canvas, and int32 ``[R]`` tokens each request may still emit.
        """
        requests, computed_R = self.requests, num_computed_R
        start_R, end_R = self.start_N[slots_R], requests.end.gpu[slots_R]
        cut = self.config.method.slots
        if cut is not None:
            tokens_RC = self.canvas_NC[slots_R]
            length_R = requests.block_length.gpu[slots_R]
            slots = cut(tokens_RC, length_R, computed_R, self.mask_id)
        elif self.floating is None:
            slots = self._blocks_of(slots_R, start_R, computed_R)
        else:
            context = self.max_model_len
            slots = self.floating.slots(slots_R, computed_R, context)
        canvas = self._canvas(slots_R, *slots)
        return canvas, (end_R - start_R).to(torch.int32)

    def _blocks_of(
        self, slots_R: Tensor, start_R: Tensor, num_computed_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return size and whether it is computed of each block, and the block of each position."""
        blocks, requests = self.full_NS.shape[1], self.requests
        length_R1 = requests.block_length.gpu[slots_R][:, None]
        limit_R1 = (requests.blocks_end.gpu[slots_R] - start_R)[:, None]
        most_R1 = requests.max_blocks.gpu[slots_R][:, None]

        slot_S = torch.arange(blocks, device=self.device)
        low_RS = slot_S * length_R1
        high_RS = torch.minimum(low_RS + length_R1, limit_R1)
        exists_RS = (low_RS < high_RS) & (slot_S < most_R1)
        # A block that the canvas would cut waits until a commit has moved the canvas on.
        exists_RS &= high_RS <= self.num_positions
        size_RS = torch.where(exists_RS, high_RS - low_RS, 0).to(torch.int32)
        end_RS = low_RS + size_RS

        position_C = torch.arange(self.num_positions, device=self.device)
        block_RC = (position_C // length_R1).clamp_max(blocks - 1)
        inside_RC = position_C < end_RS.gather(1, block_RC)
        block_RC = torch.where(inside_RC, block_RC, blocks)
        return size_RS, end_RS <= num_computed_R[:, None], block_RC

    def _canvas(
        self, slots_R: Tensor, size_RS: Tensor, computed_RS: Tensor, block_RC: Tensor
    ) -> Canvas:
        """Gather the rest of what a strategy sees."""
        requests, number = self.requests, self.requests.number
        policy_R = requests.policy.gpu[slots_R]
        most_R = number("max_post_steps", slots_R)
        sub_length_R = number("sub_block_length", slots_R)
        decoded_R = number("decoded_token_threshold", slots_R)
        return Canvas(
            tokens_RC=self.canvas_NC[slots_R],
            size_RS=size_RS,
            computed_RS=computed_RS,
            block_RC=block_RC,
            open_R=self.open_N[slots_R],
            full_RS=self.full_NS[slots_R],
            saw_stop_R=self.saw_stop_N[slots_R],
            ended_R=self.ended_N[slots_R],
            step_R=self.block_step_N[slots_R],
            block_add_threshold_R=number("block_add_threshold", slots_R),
            decoded_token_threshold_R=decoded_R,
            max_active_R=number("max_active_blocks", slots_R),
            sub_length_R=sub_length_R.to(torch.int64),
            tail_R=self.tail_N[slots_R],
            edits_R=policy_R == POLICY_IDS["joint_threshold"],
            edits_left_R=most_R - self.post_step_N[slots_R],
        )

    def bounds_np(self, slots_np: np.ndarray, start: np.ndarray) -> Bounds:
        """Return, on the host, the bounds of canvases that start at `start`."""
        layout = self.requests.layout(slots_np)
        limits = (self.num_positions, self.max_model_len)
        return bounds(layout, start, *limits, self.config.method.exact_end)

    def stores_block(self, slots_R: Tensor, computed_R: Tensor) -> Tensor:
        """Return whether the first block of each canvas has no masks, bool ``[R]``."""
        # Of `computed_R` positions, which end a block that is longer.
        requests, start_R = self.requests, self.start_N[slots_R]
        rest_R = requests.blocks_end.gpu[slots_R] - start_R
        end_R = torch.minimum(requests.block_length.gpu[slots_R], rest_R)
        end_R = torch.minimum(end_R, computed_R)
        masked_RC = self.canvas_NC[slots_R] == self.mask_id
        return ~(masked_RC & (self.position_C < end_R[:, None])).any(dim=1)

    def given(self, slots_R: Tensor) -> Tensor:
        """Return the canvas positions that templates give, bool ``[R, C]``."""
        origin_R = self.requests.origin.gpu[slots_R]
        first_R1 = (self.start_N[slots_R] - origin_R)[:, None]
        return self.templates.given(slots_R, first_R1 + self.position_C)

    def next_refresh_np(self, slots_np: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Return, on the host, where the refresh after the block at `start` begins."""
        layout = self.requests.layout(slots_np)
        origin, length = layout.prompt_len, layout.block_length
        place = start + length - origin
        place = self.templates.next_block_np(slots_np, place, length)
        return refresh_start(layout, origin + place)

    def advance(
        self,
        slots_R: Tensor,
        plan: StepPlan,
        outcome: StepOutcome,
        tokens_RC: Tensor,
        saw_stop_R: Tensor,
    ) -> None:
        """Write a step's result: shift committed positions and blocks out of the canvas."""
        length, blocks = self.num_positions, self.full_NS.shape[1]
        # What ends a request can be emitted from inside a block; its canvas goes no further.
        committed_R, ended_R = outcome.num_committed_R, outcome.ended_R
        moved_R = torch.where(ended_R, plan.num_committed_R, committed_R)
        position_C = torch.arange(length, device=self.device)
        from_RC = position_C + moved_R.to(torch.int64)[:, None]
        moved_RC = tokens_RC.gather(1, from_RC.clamp_max(length - 1))
        moved_RC = moved_RC.masked_fill(from_RC >= length, self.mask_id)
        self.canvas_NC[slots_R] = moved_RC

        slot_S = torch.arange(blocks, device=self.device)
        from_RS = slot_S + plan.num_stored_R[:, None]
        full_RS = plan.full_RS.gather(1, from_RS.clamp_max(blocks - 1))
        self.full_NS[slots_R] = full_RS & (from_RS < blocks)
        self.open_N[slots_R] = plan.open_R - plan.num_stored_R.to(torch.int32)
        self.saw_stop_N[slots_R] = saw_stop_R
        self.ended_N[slots_R] = ended_R
        denoised_R = plan.active_RS.any(dim=1)
        # Only steps of the first unfinished block are counted.
        length_R = self.requests.block_length.gpu[slots_R]
        stop_R = (leading(~plan.active_RS) + 1) * length_R
        left_RC = plan.candidates_RC & ~outcome.unmask_RC
        left_RC &= position_C < stop_R[:, None]
        goes_on_R = left_RC.any(dim=1) | ~denoised_R
        step_R = self._step(slots_R, plan) + denoised_R.to(torch.int32)
        self.block_step_N[slots_R] = step_R.where(goes_on_R, 0)
        self.start_N[slots_R] += moved_R
        self.tail_N[slots_R] = (self.tail_N[slots_R] - moved_R).clamp_min(0)
        waits_R = plan.checks_R & (plan.num_stored_R == 0)
        self.post_step_N[slots_R] = (self.post_step_N[slots_R] + 1) * waits_R
        # A check that replaced a token counts, whatever else its forward computed.
        self.step_N[slots_R] += denoised_R | waits_R
        self.cached_N[slots_R] = denoised_R

    def _step(self, slots_R: Tensor, plan: StepPlan) -> Tensor:
        """Return the step of its block that each request has taken, int32."""
        step_R = self.block_step_N[slots_R]
        if not self.config.method.skips_steps:
            return step_R
        left_R = plan.candidates_RC.sum(dim=1)
        steps_R = self.requests.steps.gpu[slots_R]
        return step_with_quota(step_R, left_R, steps_R).to(torch.int32)

    def copy_rows(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Make the canvases of some slots equal to those of others."""
        for row in self._rows:
            row[to_slots] = row[from_slots]


def count_canvases(batch: "InputBatch") -> int:
    """Count the requests of a batch that bring a canvas; they come first."""
    drafts = batch.num_draft_tokens_per_req
    return 0 if drafts is None else int(np.count_nonzero(drafts))
