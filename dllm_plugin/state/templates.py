"""Store which positions of an answer its request gave, by a template.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N is the number of slots.
"""

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.arguments import Template
from dllm_plugin.decoding.full_attention import NO_LIMIT
from dllm_plugin.state.request_table import SlotTable


class Templates:
    """Store the given tokens of each slot's answer.

    table   bool ``[N, C]``, by position of the answer; made for the first request with a template
    has_np  bool, whether a slot's request has one
    tail_start_np  int64, where the text after the last gap begins if a template is longer than
            the canvas, else NO_LIMIT
    tails   that text, by slot
    """

    def __init__(self, canvas_NC: Tensor) -> None:
        self.shape, self.device = canvas_NC.shape, canvas_NC.device
        self.has_np = np.zeros(self.shape[0], dtype=np.bool_)
        self.tail_start_np = np.full(self.shape[0], NO_LIMIT)
        self.tails: dict[int, tuple[int, ...]] = {}
        self.table: SlotTable | None = None
        self._dirty = False

    def add_request(self, slot: int, template: Template | None, end: int) -> None:
        """Stage the template, if any, of a request that starts at `slot`.

        Args:
            end: absolute position where the last gap ends.
        """
        if template is None and not self.has_np[slot]:
            return
        if self.table is None:
            self.table = SlotTable(
                (self.shape[0], self.shape[1]), torch.bool, self.device
            )
        self.has_np[slot], self._dirty = template is not None, True
        self.tail_start_np[slot] = NO_LIMIT
        self.tails.pop(slot, None)
        self.table.np[slot] = False
        if template is not None:
            num_positions = self.shape[1]
            ids = np.array(template.token_ids[:num_positions])
            self.table.np[slot, : len(ids)] = ids != FILL
            if len(template.token_ids) > num_positions:
                self.tail_start_np[slot] = end
                self.tails[slot] = template.token_ids[template.end :]

    def copy_to_device(self) -> None:
        """Copy what was staged since the last call to the device."""
        if self._dirty and self.table is not None:
            self.table.copy_to_device()
            self._dirty = False

    def given(self, slots_R: Tensor, place_RX: Tensor) -> Tensor:
        """Return which positions of answers are given, bool ``[R, X]``."""
        assert self.table is not None
        last = self.shape[1] - 1
        given_RX = self.table.gpu[slots_R].gather(1, place_RX.clamp(0, last))
        return given_RX & (place_RX >= 0) & (place_RX <= last)

    def next_block_np(
        self, slots_np: np.ndarray, place: np.ndarray, block_length: np.ndarray
    ) -> np.ndarray:
        """Return the start of the first block with a gap, from answer position `place` on."""
        if self.table is None or not self.has_np[slots_np].any():
            return place
        is_gap = ~self.table.np[slots_np] & (np.arange(self.shape[1]) >= place[:, None])
        start = is_gap.argmax(axis=1) // block_length * block_length
        return np.where(self.has_np[slots_np] & is_gap.any(axis=1), start, place)
