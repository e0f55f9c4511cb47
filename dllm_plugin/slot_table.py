"""Numbers per request slot that the host writes and every step reads on the device."""

import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor


class SlotTable:
    """`np` is the host's copy; `gpu` lies in device memory, always at the same place.

    vLLM's own tables stay in host memory that the device can read, which each kernel then does
    anew, and are copied in every step. These are copied when `copy_to_device` is called, in the
    order of the stream: work that is queued still reads what was there before.
    """

    def __init__(
        self, size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._staged = UvaBackedTensor(size, dtype=dtype)
        self.np = self._staged.np
        self.gpu = torch.zeros(size, dtype=dtype, device=device)

    def copy_to_device(self) -> None:
        """Bring what the host wrote to the device, without waiting for it."""
        self.gpu.copy_(self._staged.copy_to_uva(), non_blocking=True)
