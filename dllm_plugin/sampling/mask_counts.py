"""Track on the host an upper bound of masked positions per block, without device syncs.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N slots.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NO_SLOT = -1


class CopiedCounts(NamedTuple):
    """List the masks that a step left, while they are copied to the host.

    slots_np   slots of its requests; NO_SLOT if the request is gone
    starts_np  canvas starts of the requests, as the host knew them
    left_R     masked positions of their current blocks after the step; 0 if those are done
    event      end of the copy; None on CPUs, which need no copy
    """

    slots_np: np.ndarray
    starts_np: np.ndarray
    left_R: Tensor
    event: torch.cuda.Event | None


class Arrival(NamedTuple):
    """Store the target of a copy: pinned memory for all slots, and the event of its end."""

    left_N: Tensor
    event: torch.cuda.Event


class MaskCounts:
    """Store how many masks the last steps left, by slot.

    A step whose result the scheduler has not seen yet is not waited for: masks only become fewer,
    except if a grammar takes tokens back. How many steps that is must not depend on time, because
    all ranks count the same rows.

    grows_np  whether a slot's masks may become more; its blocks count as a whole while steps are
              in flight
    """

    def __init__(self, num_slots: int, steps_in_flight: int) -> None:
        """Make the tables; `steps_in_flight` may be queued after the last known step."""
        self.steps_in_flight = steps_in_flight
        self.left_N = np.zeros(num_slots, dtype=np.int64)
        self.start_N = np.zeros(num_slots, dtype=np.int64)
        self.grows_np = np.zeros(num_slots, dtype=np.bool_)
        self._copied: deque[CopiedCounts] = deque()
        # Used in turn, more than are in flight.
        self._arrivals: deque[Arrival] = deque()

    def record(
        self, slots_np: np.ndarray, starts_np: np.ndarray, left_R: Tensor
    ) -> None:
        """Start the copy of the masks that a step left."""
        event = None
        if left_R.is_cuda:
            left_R, event = self._copy(left_R)
        self._copied.append(CopiedCounts(slots_np.copy(), starts_np, left_R, event))

    def _copy(self, left_R: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start the copy to memory that no copy in flight uses."""
        if len(self._arrivals) <= len(self._copied):
            left_N = torch.empty(len(self.left_N), dtype=left_R.dtype, pin_memory=True)
            self._arrivals.appendleft(Arrival(left_N, torch.cuda.Event()))
        arrival = self._arrivals[0]
        self._arrivals.rotate(-1)
        copied_R = arrival.left_N[: len(left_R)].copy_(left_R, non_blocking=True)
        arrival.event.record()
        return copied_R, arrival.event

    def forget(self, slot: int) -> None:
        """Free a slot, which gets another request."""
        self.left_N[slot] = 0
        for copied in self._copied:
            copied.slots_np[copied.slots_np == slot] = NO_SLOT

    def most(
        self, slots_np: np.ndarray, starts_np: np.ndarray, sizes_np: np.ndarray
    ) -> np.ndarray:
        """Return an upper bound of masks, at least one, of the blocks that start there.

        Args:
            sizes_np: positions of these blocks: the bound of a block without a known step.
        """
        while len(self._copied) > self.steps_in_flight:
            copied = self._copied.popleft()
            if copied.event is not None:
                copied.event.synchronize()  # the scheduler has seen this step's result
            known = copied.slots_np != NO_SLOT
            slots = copied.slots_np[known]
            self.left_N[slots] = copied.left_R.numpy()[known]
            self.start_N[slots] = copied.starts_np[known]
        left = self.left_N[slots_np]
        is_known = (left > 0) & (self.start_N[slots_np] == starts_np)
        if self.steps_in_flight:
            is_known &= ~self.grows_np[slots_np]
        return np.maximum(np.where(is_known, left, sizes_np), 1)
