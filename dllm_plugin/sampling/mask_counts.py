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
    left_R     masked positions of their current blocks after the step; 0 if those are done; on
               the host, once the copy has ended
    event      end of the copy; None on CPUs, which need no copy
    """

    slots_np: np.ndarray
    starts_np: np.ndarray
    left_R: Tensor
    event: torch.cuda.Event | None


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

    def record(
        self, slots_np: np.ndarray, starts_np: np.ndarray, left_R: Tensor
    ) -> None:
        """Start the copy of the masks that a step left."""
        event = None
        if left_R.is_cuda:
            # To pinned memory, which torch hands out again only after the copy.
            left_R = left_R.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._copied.append(CopiedCounts(slots_np.copy(), starts_np, left_R, event))

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
