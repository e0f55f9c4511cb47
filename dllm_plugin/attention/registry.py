"""Register our attention backends with vLLM, for as long as a model is built.

vLLM lets a model choose its backend through a registry of the whole process. We change it while one
of our models is built and restore it afterwards; then every layer is asked which backend it took.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from .backends import CUSTOM, FLASH_ATTN, FLEX_ATTENTION

DISTINCT = "dllm_plugin.attention.distinct.DistinctBackend"
FLEX = "dllm_plugin.attention.flex.SegmentFlexBackend"
FLASH = "dllm_plugin.attention.flash.SegmentFlashBackend"


@contextmanager
def registered(vllm_config: VllmConfig, layout: str) -> Iterator[None]:
    """Make vLLM's registry answer with the backends of ours that this model needs.

    CPUs use one backend whatever is selected, and ask the registry for its class. vLLM caches the
    answer to CUSTOM, which other models of the process do not select; our versions of FlexAttention
    and FlashAttention serve any model.
    """
    ours = _needed(vllm_config, layout)
    before = {name: name.get_path() for name in ours if name.is_overridden()}
    for name, path in ours.items():
        register_backend(name, path)
    try:
        yield
    finally:
        for name in ours:
            name.clear_override()
            if name in before:
                register_backend(name, before[name])
    if ours:
        _check_taken(vllm_config, set(ours.values()))


def _needed(vllm_config: VllmConfig, layout: str) -> dict[AttentionBackendEnum, str]:
    if layout == "distinct" and current_platform.is_cpu():
        return {name: DISTINCT for name in (CUSTOM, AttentionBackendEnum.CPU_ATTN)}
    if layout == "distinct":
        return {CUSTOM: DISTINCT}
    if current_platform.is_cpu():
        return {}
    chosen = vllm_config.attention_config.backend
    ours = {FLEX_ATTENTION: FLEX, FLASH_ATTN: FLASH}
    return {name: path for name, path in ours.items() if name == chosen}


def _check_taken(vllm_config: VllmConfig, ours: set[str]) -> None:
    from vllm.model_executor.layers.attention import Attention

    for name, layer in get_layers_from_vllm_config(vllm_config, Attention).items():
        taken = layer.get_attn_backend()
        if f"{taken.__module__}.{taken.__qualname__}" not in ours:
            raise ValueError(
                f"vLLM gave layer {name} the attention backend {taken.__qualname__} where one of "
                "DiffuPlug's was selected: another model of this process has it under the same "
                "name; start this one in a process of its own."
            )
