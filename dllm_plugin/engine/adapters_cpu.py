"""Keep adapters of requests on CPUs to the requests that have one.

vLLM's plain-torch form of the LoRA kernels looks the adapter of each row up by the number of its
slot, and the -1 of a row without one is, in Python, the last slot.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class RowsOfAdapters(PunicaWrapperCPU):
    """Compute updates of rows that have an adapter."""

    def _shrink_prefill(
        self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float
    ) -> None:
        """Compute x @ A for every row: [rows, in] -> y [rows, rank]; 0 without an adapter."""
        super()._shrink_prefill(y, x, w_t_all, scale)
        y.masked_fill_((self.token_lora_indices < 0).unsqueeze(-1), 0)


class AdapterRunner(GPUModelRunner):
    """Run the model runner with these rows."""

    def load_lora_model(self, *args: Any) -> Any:
        """Load as vLLM does, and exchange the class of what it has made for each model."""
        model: Any = super().load_lora_model(*args)
        for wrapper in model.lora_manager.punica_wrapper_mapping.values():
            wrapper.__class__ = RowsOfAdapters
        return model
