"""Run vLLM's CPU worker with our model runner.

That worker names its runner's class where none can be put in its place, so the class of the runner
that it has just constructed is exchanged. Imported on CPUs alone: vLLM's module replaces functions
of torch.cuda.

Keep adapters of requests on CPUs to the requests that have one.

vLLM's plain-torch form of the LoRA kernels looks the adapter of each row up by the number of its
slot, and the -1 of a row without one is, in Python, the last slot.

Pack new weights for CPUs as vLLM packs those at load; it leaves experts and tied heads out.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dllm_plugin.engine.platforms import request_tiles
from dllm_plugin.engine.worker.graph_times import TimingWorker
from dllm_plugin.engine.worker.weight_updates import AdapterWorker, UpdatingWorker
from dllm_plugin.engine.worker.worker import GrammarRunner


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


class PackingWorker(UpdatingWorker):
    """Run updates of weights on a CPU."""

    kernels: tuple[tuple[Any, Any], ...] = ()  # of experts, while weights come

    def _open_layers(self, model: Any) -> None:
        """Take the kernels of experts away: vLLM packs experts only while it makes a kernel."""
        experts = [
            layer for layer in model.modules() if isinstance(layer, RoutedExperts)
        ]
        methods: list[Any] = [layer.quant_method for layer in experts]
        self.kernels = tuple((method, method.moe_kernel) for method in methods)
        for method in methods:
            method.moe_kernel = None

    def _close_layers(self, model: Any) -> None:
        """Give experts without new weights their kernels back, and pack a tied LM head."""
        for method, kernel in self.kernels:
            method.moe_kernel = method.moe_kernel or kernel
        self.kernels = ()
        # vLLM packs the embedding, whose numbers it shares.
        if model.config.tie_word_embeddings:
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


class DiffusionCPUWorker(AdapterWorker, PackingWorker, TimingWorker, CPUWorker):
    """Run vLLM's CPU worker with grammars on canvases, adapters and new weights."""

    def init_device(self) -> None:
        """Initialize as vLLM does, then put our runner's methods before those of vLLM's."""
        request_tiles(self.model_config)
        super().init_device()
        runner = self.model_runner
        ours = (GrammarRunner, AdapterRunner, type(runner))
        runner.__class__ = type("DiffusionCPURunner", ours, {})
