"""Every symbol of vLLM that weights rely on: updates, adapters of requests, quantised mixtures."""

from surface import (
    WEIGHTS,
    field_test,
    import_test,
    listed_imports,
    made_imports,
    signature_test,
)
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.v1.worker.worker_base import WorkerBase

from dllm_plugin.models.checkpoints.weights import PARTIAL_BACKENDS

IMPORTS = """
vllm.config: set_current_vllm_config
vllm.model_executor.layers.fused_moe.routed_experts: RoutedExperts
vllm.model_executor.model_loader.reload.layerwise: finalize_layerwise_reload get_layerwise_info
vllm.lora.punica_wrapper.punica_cpu: PunicaWrapperCPU
vllm.lora.request: LoRARequest
vllm.v1.worker.cpu_worker: CPUWorker
vllm.v1.worker.gpu.model_runner: GPUModelRunner
"""
WORKER, RELOAD = (
    "v1.worker.gpu_worker:Worker.",
    "model_executor.model_loader.reload.layerwise:",
)
RUNNER = "v1.worker.gpu.model_runner:GPUModelRunner."
COMPRESSED = "model_executor.layers.quantization.compressed_tensors.compressed_tensors:"
COMPRESSED += "CompressedTensorsConfig."
PUNICA = "lora.punica_wrapper.punica_cpu:PunicaWrapperCPU."
SIGNATURES = {
    WORKER + "start_weight_update": "self",
    WORKER + "update_weights": "self update_info",
    WORKER + "finish_weight_update": "self",
    WORKER + "reload_weights": "self *args **kwargs",
    WORKER + "get_model": "self",
    WORKER + "add_lora": "self lora_request",
    RUNNER + "load_lora_model": "self model vllm_config device",
    PUNICA + "_shrink_prefill": "self y x w_t_all scale",
    RELOAD + "finalize_layerwise_reload": "*args **kwargs",
    RELOAD + "get_layerwise_info": "layer",
    COMPRESSED + "from_config": "config",
    COMPRESSED + "get_scheme_dict": "self layer layer_name=None",
    COMPRESSED + "_add_fused_moe_to_target_scheme_map": "self",
}
FIELDS = {
    LayerReloadingInfo: "load_numel loaded_weights",
    LoRAModelManager: "punica_wrapper_mapping",
    LoRARequest: "lora_name lora_path",
    UnquantizedFusedMoEMethod: "moe_kernel",
    WeightTransferConfig: "backend",
    WorkerBase: "model_config vllm_config",
}
WHOLE_BACKENDS = {"nccl", "ipc"}


def test_imports_are_listed() -> None:
    assert set(made_imports(*WEIGHTS)) == listed_imports(IMPORTS)


test_import = import_test(IMPORTS)
test_signature = signature_test(SIGNATURES)
test_fields = field_test(FIELDS)


def test_every_backend_is_known() -> None:
    """One more has to be read: does it hand all weights, each once, to `load_weights`?"""
    registered = set(WeightTransferEngineFactory._registry) - {"files"}
    assert registered == WHOLE_BACKENDS | set(PARTIAL_BACKENDS)
