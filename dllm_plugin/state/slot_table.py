"""Keep numbers per request slot that the host writes and every step reads on the device."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


class SlotTable:
    """Hold `np`, the host's copy, and `gpu`, in device memory and always at the same place.

    vLLM's own tables stay in host memory that the device can read, which each kernel then does
    anew, and are copied in every step. These are copied when `copy_to_device` is called, in the
    order of the stream: work that is queued still reads what was there before.
    """

    def __init__(
        self, size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.np: np.ndarray = torch.zeros(size, dtype=dtype).numpy()
        self.gpu = torch.zeros(size, dtype=dtype, device=device)

    def copy_to_device(self) -> None:
        """Bring what the host wrote to the device, without waiting for it."""
        async_tensor_h2d(self.np, out=self.gpu)
