"""Run vLLM's CPU worker with our model runner, adapters of requests and new weights.

vLLM's CPU worker has no hook for a runner class, so the class of the runner that it has just
constructed is exchanged. Imported only on CPUs: vLLM's module replaces functions of torch.cuda.

vLLM's plain-torch LoRA kernels index adapters by slot number; the -1 of a row without an adapter
is, in Python, the last slot. For updated weights vLLM packs neither experts nor tied heads.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dllm_plugin.engine.platforms import request_tiles

from .weight_updates import UpdatingWorker
from .worker import GrammarRunner


class RowsOfAdapters(PunicaWrapperCPU):
    """Compute LoRA updates only for rows that have an adapter."""

    def _shrink_prefill(
        self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float
    ) -> None:
        """Compute x @ A for every row: [rows, in] -> y [rows, rank]; 0 without an adapter."""
        super()._shrink_prefill(y, x, w_t_all, scale)
        y.masked_fill_((self.token_lora_indices < 0).unsqueeze(-1), 0)


class AdapterRunner(GPUModelRunner):
    """Run the model runner with `RowsOfAdapters`."""

    def load_lora_model(self, *args: Any) -> Any:
        """Load as vLLM does, and exchange the class of what it has made for each model."""
        model: Any = super().load_lora_model(*args)
        for wrapper in model.lora_manager.punica_wrapper_mapping.values():
            wrapper.__class__ = RowsOfAdapters
        return model


class DiffusionCPUWorker(UpdatingWorker, CPUWorker):
    """Run vLLM's CPU worker with grammars on canvases, adapters and new weights."""

    kernels: tuple[tuple[Any, Any], ...] = ()  # of experts, while weights come

    def _open_layers(self, model: Any) -> None:
        """Remove the kernels of experts: vLLM packs experts only when it makes a kernel."""
        experts = [
            layer for layer in model.modules() if isinstance(layer, RoutedExperts)
        ]
        methods: list[Any] = [layer.quant_method for layer in experts]
        self.kernels = tuple((method, method.moe_kernel) for method in methods)
        for method in methods:
            method.moe_kernel = None

    def _close_layers(self, model: Any) -> None:
        """Restore the kernels of experts without new weights, and pack a tied LM head."""
        for method, kernel in self.kernels:
            method.moe_kernel = method.moe_kernel or kernel
        self.kernels = ()
        # vLLM packs the embedding, whose numbers it shares.
        runner: Any = self.model_runner
        if runner.is_last_pp_rank and model.config.tie_word_embeddings:
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    def init_device(self) -> None:
        """Initialize as vLLM does, then put our runner's methods before those of vLLM's."""
        request_tiles(self.model_config)
        super().init_device()
        runner = self.model_runner
        ours = (GrammarRunner, AdapterRunner, type(runner))
        runner.__class__ = type("DiffusionCPURunner", ours, {})
