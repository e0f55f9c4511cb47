"""Let masked positions take the tokens that their request names, and no others.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N slots.
"""

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from dllm_plugin.config.request.targets import targets_of
from dllm_plugin.config.request.template import FILL, template_of
from dllm_plugin.kernels.confidence.reference import RowStats
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.state.canvas_states import CanvasStates
from dllm_plugin.state.request_table import SlotTable

NO_TARGET = -1


class Targets:
    """Hold the targets of each slot's request.

    table   int64 ``[N, C]``, NO_TARGET where a position has none; made when a request first asks
    has_np  bool, whether a slot's request has any
    active  whether a request of this step does
    """

    def __init__(self, states: CanvasStates) -> None:
        self.states = states
        self.has_np = np.zeros(states.canvas_NC.shape[0], dtype=np.bool_)
        self.table: SlotTable | None = None
        self.active = False
        self._dirty = False

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Note the targets of a request that starts at `slot`, or that it has none."""
        targets = targets_of(params.extra_args)
        if targets is None and not self.has_np[slot]:
            return
        if self.table is None:
            shape, device = self.states.canvas_NC.shape, self.states.device
            self.table = SlotTable((shape[0], shape[1]), torch.int64, device)
            self.table.np.fill(NO_TARGET)
        self.has_np[slot], self._dirty = targets is not None, True
        self.table.np[slot] = NO_TARGET
        template = template_of(params.extra_args)
        if targets is not None and template is not None:
            places = np.flatnonzero(np.array(template.token_ids) == FILL)
            self.table.np[slot, places] = targets

    def apply_staged_writes(self) -> None:
        """Bring what was noted since the last call to the device."""
        if self._dirty and self.table is not None:
            self.table.copy_to_device()
            self._dirty = False

    def start_step(self, slots_np: np.ndarray) -> None:
        """See whether a request of this step has targets."""
        self.active = self.table is not None and bool(self.has_np[slots_np].any())

    def put(self, stats: RowStats, chunk: RowChunk) -> RowStats:
        """Return the proposals of some rows with the targets in place of what was proposed.

        The one forward of such a request has its whole template on the canvas.
        """
        if not self.active:
            return stats
        assert self.table is not None
        num_rows = len(chunk.slot_T)
        target_T = self.table.gpu[chunk.slot_T, chunk.offset_T.to(torch.int64)]
        has_T = target_T != NO_TARGET
        stats.token_T[:num_rows] = target_T.where(has_T, stats.token_T[:num_rows])
        stats.confidence_T[:num_rows].masked_fill_(has_T, 1.0)
        return stats

    def take(self, slots_R: Tensor, candidates_RC: Tensor, unmask_RC: Tensor) -> Tensor:
        """Return what a step unmasks: what policies pick, and every position with a target."""
        if not self.active:
            return unmask_RC
        assert self.table is not None
        return unmask_RC | (candidates_RC & (self.table.gpu[slots_R] != NO_TARGET))
