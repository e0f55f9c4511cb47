"""View floating canvases: a run that commits, and a window of masks after it.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N is the number of slots.
"""

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.decoding.floating import block_slots
from dllm_plugin.kernels.floating import Rules, Texts, split, stops

from .request_table import RequestTable


class FloatingView:
    """Cut canvases into the slots of a step.

    texts   where each slot's text lies
    pieces  of each slot, the end of its prompt and those of what it had committed before it came
            back from preemption, int64 on the host
    """

    def __init__(
        self,
        config: DecodeConfig,
        canvas_NC: Tensor,
        start_N: Tensor,
        requests: RequestTable,
    ) -> None:
        self.config = config
        self.canvas_NC = canvas_NC
        self.texts = Texts(start_N, requests.origin.gpu, requests.end.gpu)
        self.num_slots = config.block_slots
        self.shift = int(config.family.logits_shift)
        self.pieces: dict[int, np.ndarray] = {}

    def rules(self, context: int) -> Rules:
        """Return the layout rules shared by all canvases."""
        config = self.config
        on_grid = config.family.absolute_grid
        return Rules(config.block_length, on_grid, context, config.mask_token_id)

    def slots(
        self, slots_R: Tensor, num_computed_R: Tensor, context: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return size and whether it is computed of each slot, and the slot of each position."""
        texts = Texts(*(table[slots_R] for table in self.texts))
        rules = self.rules(context)
        canvas_RC = self.canvas_NC[slots_R]
        found = split(canvas_RC, texts, num_computed_R, rules)
        ends_RB = stops(found, num_computed_R, rules.length, self.num_slots - 1)
        zero_R1 = torch.zeros_like(ends_RB[:, :1])
        size_RS = ends_RB.diff(dim=1, prepend=zero_R1)[:, :-1]
        block_RC = block_slots(
            *found,
            num_computed_R,
            rules.length,
            self.num_slots,
            self.shift,
            canvas_RC.shape[1],
        )
        size_RS = size_RS.to(torch.int32)
        return size_RS, torch.ones_like(size_RS, dtype=torch.bool), block_RC

    def prefill_stops(
        self,
        slots: np.ndarray,
        is_prefill: np.ndarray,
        ends: np.ndarray,
        stops_RK: np.ndarray,
    ) -> np.ndarray:
        """Return the stops of prefills, with those of resumed texts at the ends of their pieces."""
        length = self.config.block_length
        borders = {}
        for i in np.flatnonzero(is_prefill).tolist():
            pieces = self.pieces[int(slots[i])]
            if len(pieces) < 2:
                continue
            whole = pieces[:0]
            if self.config.family.absolute_grid:
                whole = np.arange(length, pieces[0], length)
            borders[i] = np.concatenate([whole, pieces])
        if not borders:
            return stops_RK
        most = max(stops_RK.shape[1], *map(len, borders.values()))
        padding = ((0, 0), (0, most - stops_RK.shape[1]))
        stops_RK = np.pad(stops_RK, padding, mode="edge")
        for i, border in borders.items():
            stops_RK[i] = ends[i]
            stops_RK[i, : len(border)] = np.minimum(border, ends[i])
        return stops_RK
