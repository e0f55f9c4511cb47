"""Refuse adapters of requests where they cannot give what the merged adapter would."""

from vllm.config import VllmConfig
from vllm.platforms import current_platform


def refuse_adapters(vllm_config: VllmConfig, lora_path: str | None) -> None:
    """Raise ValueError if `enable_lora` cannot be combined with what is served."""
    if vllm_config.lora_config is None:
        return
    model_config = vllm_config.model_config
    if lora_path:
        raise ValueError(
            f"enable_lora cannot be combined with lora_path '{lora_path}': adapters of requests "
            "were trained on the base, not on merged weights. Leave one of them out."
        )
    stored = model_config.model_arch_config.quantization_config is not None
    if stored or model_config.quantization is not None:
        raise ValueError(
            f"enable_lora needs unquantised weights, got quantization "
            f"{model_config.quantization!r}: serve the unquantised base model."
        )
    if model_config.is_moe and current_platform.is_cpu():
        raise ValueError(
            f"enable_lora on {model_config.architecture} needs a GPU: under it vLLM computes "
            "experts by Triton kernels alone. Merge one adapter by lora_path."
        )
