"""Define a step feature: something that requests may ask for, and that acts in their steps.

The verbs are those of the samplers of vLLM; the moments are those of a denoising step. Shape
letters as in :mod:`dllm_plugin.decoding.plan`.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.plan import Canvas
from dllm_plugin.kernels.confidence.reference import RowStats
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.sampling.step import Emitted, Step
from dllm_plugin.state.canvas_states import CanvasStates
from dllm_plugin.state.request_table import SlotTable

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

# How rows of a request are read: once, from float32 copies, or from copies that are scored, too.
ONCE, COPIED, SCORED = range(3)


class ReadRows(NamedTuple):
    """List the canvases whose rows are read; fields as in :class:`Step`."""

    canvas: Canvas
    slots_R: Tensor
    slots_np: np.ndarray
    source_RC: Tensor


class StepFeature:
    """Do nothing in any step: the base of all features.

    A step calls the moments of its active features only. A step without any is compiled.

    reads     how the rows of requests with this feature are read
    method    how the model decodes
    mask_id   id of the mask token
    num_slots  rows of a table by slot
    num_positions  positions of a canvas; `position_C`: these, int64
    users_np  bool ``[N]``, slots whose request uses the feature
    in_use    whether there is such a slot
    """

    reads = ONCE

    def __init__(self, states: CanvasStates) -> None:
        self.states = states
        self.method = states.config.method
        self.device = states.device
        self.mask_id = states.config.mask_token_id
        self.num_slots, self.num_positions = states.canvas_NC.shape
        self.position_C = states.position_C
        self.users_np = np.zeros(self.num_slots, dtype=np.bool_)
        self.in_use = False
        self._staged: list[SlotTable] = []

    def staged_table(
        self, size: Any, dtype: torch.dtype, fill: Any = None
    ) -> SlotTable:
        """Make a table that `apply_staged_writes` copies; `fill` is its neutral value."""
        table = SlotTable(size, dtype, self.device)
        if fill is not None:
            table.write(..., fill)
        self._staged.append(table)
        return table

    def upload(self, values: np.ndarray | Tensor) -> Tensor:
        """Copy values to the device, without waiting for the copy."""
        return async_tensor_h2d(values, device=self.device)

    # Verbs, on the host.

    def warm_up(self, logits_XV: Tensor, carry_NV: Tensor | None) -> None:
        """Launch own kernels in all forms, so that no request waits until they are compiled.

        Args:
            carry_NV: rows that steps keep by slot; None if they keep none.
        """

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Stage a request; return whether it uses the feature."""
        return False

    def remove_request(self, slot: int) -> None:
        """Free what a request that used the feature has staged."""

    def apply_staged_writes(self) -> None:
        """Copy staged requests to the device."""
        for table in self._staged:
            table.copy_to_device()

    def active(self, slots_np: np.ndarray) -> bool:
        """Return whether a request in these slots uses the feature."""
        return self.in_use and bool(self.users_np[slots_np].any())

    def mark(self, slot: int, uses: bool) -> None:
        """Write whether the slot's request uses the feature."""
        if uses != self.users_np[slot]:
            self.users_np[slot] = uses
            self.in_use = bool(self.users_np.any())

    def free(self, slot: int) -> None:
        """Free the slot, if its request used the feature."""
        if self.users_np[slot]:
            self.remove_request(slot)
            self.mark(slot, False)

    # Moments, in the order of a step. They read nothing of the device on the host.

    def start_step(self, step: Step) -> None:
        """Prepare a step before its rows are read; may replace canvas, plan and rows."""
        source_RC = step.source_RC
        rows = ReadRows(step.canvas, step.slots_R, step.slots_np, source_RC)
        self.start_rows(rows)

    def start_rows(self, rows: ReadRows) -> None:
        """Prepare to read rows: those of a step, or those that predict first tokens of blocks."""

    def apply(self, logits_TV: Tensor, chunk: RowChunk, slots_np: np.ndarray) -> None:
        """Change float32 copies of rows in place, before temperature and filters.

        Args:
            slots_np: slots of the requests that have these rows.
        """

    def score(self, raw_TV: Tensor, stats: RowStats, chunk: RowChunk) -> None:
        """Score rows once they have a token; may replace tokens in place."""

    def restrict(self, step: Step) -> None:
        """Change which positions are unmasked: `step.unmask_RC`, after the policies."""

    def accept(self, step: Step) -> None:
        """Change the first token after what a causal forward keeps, before it is committed."""

    def commit(self, step: Step) -> None:
        """Commit what is kept per canvas, before the canvases move on; may change the outcome."""

    def finish_batch(
        self, logits_TV: Tensor, batch: "InputBatch", emitted: Emitted
    ) -> Emitted:
        """Return the results of a batch, after canvases moved on; prefills of it included."""
        return emitted
