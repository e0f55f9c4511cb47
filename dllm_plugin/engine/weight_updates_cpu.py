"""Pack new weights for CPUs as vLLM packs those at load; it leaves experts and tied heads out."""

from typing import Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from dllm_plugin.engine.weight_updates import UpdatingWorker


class PackingWorker(UpdatingWorker):
    """Run updates of weights on a CPU."""

    kernels: tuple[tuple[Any, Any], ...] = ()  # of experts, while weights come

    def _open_layers(self, model: Any) -> None:
        """Take the kernels of experts away: vLLM packs experts only while it makes a kernel."""
        experts = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
        methods: list[Any] = [layer.quant_method for layer in experts]
        self.kernels = tuple((method, method.moe_kernel) for method in methods)
        for method in methods:
            method.moe_kernel = None

    def _close_layers(self, model: Any) -> None:
        """Give experts without new weights their kernels back, and pack a tied LM head."""
        for method, kernel in self.kernels:
            method.moe_kernel = method.moe_kernel or kernel
        self.kernels = ()
        if model.config.tie_word_embeddings:  # vLLM packs the embedding, whose numbers it shares
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
