"""Choose the KV cache layout and the attention backend, or refuse what was asked for."""

from collections.abc import Iterator

import torch
from vllm.config import AttentionConfig, CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from dllm_plugin.config.cuda_graphs import can_capture
from dllm_plugin.config.decode import get_decode_config

logger = init_logger("vllm.dllm_plugin")

CUSTOM = AttentionBackendEnum.CUSTOM
FLEX_ATTENTION = AttentionBackendEnum.FLEX_ATTENTION
FLASH_ATTN = AttentionBackendEnum.FLASH_ATTN
TRITON_ATTN = AttentionBackendEnum.TRITON_ATTN
HEAD_SIZES = (32, 64, 128)
PAGE_UNIT = 16
FLOAT8_CACHES = ("fp8", "fp8_e4m3")
# vLLM's most splits of a context in graphs.
DEFAULT_SPLITS = AttentionConfig.flash_attn_max_num_splits_for_cuda_graph
# What `diffuplug doctor` prints for each value of `kv_cache_layout`.
REASONS = {
    "auto": "auto: vLLM's own; on Hopper GPUs with FlashAttention 3 nothing faster on the whole "
    "has been measured, and GPUs without it have not been measured",
    "unified": "asked for: vLLM's own",
    "distinct": "asked for: keys in pieces of 16 bytes, values along tokens, fused span attention",
}


def take_distinct(vllm_config: VllmConfig) -> None:
    """Select the backend of the `distinct` layout.

    Raises ValueError with one sentence if this model, device or setting cannot have it.
    """
    for problem in _problems(vllm_config):
        raise ValueError(
            f"kv_cache_layout 'distinct' {problem}; use kv_cache_layout 'unified'."
        )
    vllm_config.attention_config.backend = CUSTOM


def _problems(vllm_config: VllmConfig) -> Iterator[str]:
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    attention = vllm_config.attention_config
    if get_decode_config(vllm_config).method.causal:
        yield "sees blocks whole, but this model stores them by causal forwards"
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        yield f"runs on CPUs and CUDA GPUs, not on {current_platform.device_name}"
    elif current_platform.is_cuda() and not current_platform.has_device_capability(80):
        yield "needs a GPU of compute capability 8.0 or later"
    if attention.backend not in (None, CUSTOM) or attention.backend_per_kind:
        chosen = (
            attention.backend.name
            if attention.backend
            else "of its own for some layers"
        )
        yield f"brings its own attention, but attention_backend {chosen} is asked for"
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"stores keys as the model computes them, but kv_cache_dtype is {cache.cache_dtype}"
    if model.use_mla:
        yield "has no multi-head latent attention"
    elif model.get_head_size() not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        yield f"supports heads of {sizes}, but this model's have {model.get_head_size()}"
    if model.get_sliding_window() is not None:
        yield "has no sliding windows, but this model's layers do"
    if cache.user_specified_block_size and cache.block_size % PAGE_UNIT:
        yield f"needs pages of {PAGE_UNIT} tokens or a multiple, got block_size {cache.block_size}"


def refuse_ignored(vllm_config: VllmConfig) -> None:
    """Refuse attention backends that vLLM's CPU platform would replace and only log.

    Other platforms refuse by themselves what they cannot run. Raises ValueError with one sentence.
    """
    if not current_platform.is_cpu():
        return
    wish = _wish(vllm_config)
    for asked in filter(None, asked_backends(vllm_config.attention_config)):
        taken = current_platform.get_attn_backend_cls(asked, wish)
        # Names that only plugins fill have no path of their own.
        if not asked.value or asked.get_path() != taken:
            raise ValueError(
                f"attention_backend {asked.name} is not for CPUs, where vLLM takes "
                f"{taken.rpartition('.')[2]} whatever is asked for: leave attention_backend out."
            )


def backend_name(vllm_config: VllmConfig) -> str:
    """Return the name of the attention backend that a model gets: the one chosen, or vLLM's."""
    chosen = vllm_config.attention_config.backend
    if chosen is not None:
        return chosen.name
    # None is what vLLM's own selector passes if nothing was chosen.
    found = current_platform.get_attn_backend_cls(None, _wish(vllm_config))  # type: ignore[arg-type]
    return found.rpartition(".")[2]


def _wish(vllm_config: VllmConfig) -> AttentionSelectorConfig:
    """Return what vLLM's platforms choose an attention backend by."""
    model = vllm_config.model_config
    assert isinstance(model.dtype, torch.dtype)  # "auto" is resolved before
    return AttentionSelectorConfig(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        kv_cache_dtype=vllm_config.cache_config.cache_dtype,
        block_size=None,
        use_mla=model.use_mla,
    )


def flash_version(vllm_config: VllmConfig) -> int | None:
    """Return the version of FlashAttention that vLLM takes on this GPU for this model, or None.

    It is None as well if another backend is asked for: finding out would import FlashAttention.
    """
    attention = vllm_config.attention_config
    other = attention.backend is not None and FLASH_ATTN not in asked_backends(
        attention
    )
    if other or not current_platform.is_cuda():
        return None
    from vllm.v1.attention.backends.fa_utils import (
        get_flash_attn_version,
        is_fa_version_supported,
    )

    pinned = attention.flash_attn_version
    if pinned is not None:
        return pinned if is_fa_version_supported(pinned) else None
    return get_flash_attn_version(head_size=vllm_config.model_config.get_head_size())


def set_causal_backend(vllm_config: VllmConfig) -> None:
    """Choose an attention backend that tells causal sequences from others, on GPUs.

    It is TRITON_ATTN. FlashAttention 3 is taken if asked for: the time of its two calls a layer has
    not been measured. Raises ValueError if the user chose another backend.
    """
    if not (
        get_decode_config(vllm_config).method.causal_commit
        and current_platform.is_cuda()
    ):
        return
    attention = vllm_config.attention_config
    takes_flash = attention.backend == FLASH_ATTN and not attention.backend_per_kind
    takes_flash = takes_flash and flash_version(vllm_config) == 3
    for asked in filter(None, asked_backends(attention)):
        if asked != TRITON_ATTN and not takes_flash:
            raise ValueError(
                f"attention_backend {asked.name} cannot mix causal and bidirectional requests, "
                "which this model needs: use TRITON_ATTN, or FLASH_ATTN for all layers if it "
                "is FlashAttention 3."
            )
    if attention.backend is None:
        attention.backend = TRITON_ATTN


def set_graph_backend(vllm_config: VllmConfig) -> None:
    """Choose an attention backend that full CUDA graphs can capture.

    Raises ValueError if the user chose a backend that they cannot capture.
    """
    if not can_capture(vllm_config):
        return
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        return
    attention = vllm_config.attention_config
    asked = attention.backend
    version = flash_version(vllm_config)
    attention.backend = backend_under_full_graphs(vllm_config, version)
    set_splits(vllm_config)
    if asked is None:
        logger.info(
            "Attention backend %s under full CUDA graphs.", attention.backend.name
        )


def set_splits(vllm_config: VllmConfig) -> None:
    """Let FlashAttention split no context of float8 keys, unless the user set another number.

    It splits by load and rounds probabilities to float8 by split, so that answers would depend on
    their neighbours.
    """
    attention = vllm_config.attention_config
    if (
        attention.backend == FLASH_ATTN
        and vllm_config.cache_config.cache_dtype in FLOAT8_CACHES
        and attention.flash_attn_max_num_splits_for_cuda_graph == DEFAULT_SPLITS
    ):
        attention.flash_attn_max_num_splits_for_cuda_graph = 1
        logger.info(
            "Graphs split no contexts of float8 keys: "
            "flash_attn_max_num_splits_for_cuda_graph 1 instead of its default, 32."
        )


def backend_under_full_graphs(
    vllm_config: VllmConfig, version: int | None
) -> AttentionBackendEnum:
    """Return the attention backend of captured steps, given the version of FlashAttention.

    It is FlashAttention 3 if possible: on our sequences that is 1.1 to 15 times as fast as
    Triton from contexts of 1,024 tokens on (benchmarks/reports/attention.md).

    Raises ValueError with one sentence if FLASH_ATTN was asked for and cannot be captured.
    """
    attention = vllm_config.attention_config
    problem = next(_flash_problems(vllm_config, version), None)
    if problem and FLASH_ATTN in asked_backends(attention):
        raise ValueError(f"attention_backend FLASH_ATTN {problem}.")
    if attention.backend is not None:
        return attention.backend
    if problem or version != 3 or attention.backend_per_kind:
        return TRITON_ATTN
    return FLASH_ATTN


def asked_backends(
    attention: AttentionConfig,
) -> tuple[AttentionBackendEnum | None, ...]:
    """Return the backends that the user named, None if the choice is open."""
    return (attention.backend, *attention.backend_per_kind.values())


def _flash_problems(vllm_config: VllmConfig, version: int | None) -> Iterator[str]:
    model = vllm_config.model_config
    head_size = model.get_head_size()
    dtype = str(model.dtype).removeprefix("torch.")
    if version not in (2, 3):
        found = f"FlashAttention {version}" if version else "none"
        yield (
            "can be captured if it is FlashAttention 2 or 3, but vLLM finds "
            f"{found} for this GPU and model: set cudagraph_mode to PIECEWISE or choose TRITON_ATTN"
        )
    if model.dtype not in (torch.float16, torch.bfloat16):
        yield f"takes float16 and bfloat16, got dtype {dtype}: choose TRITON_ATTN"
    if head_size % 8 or head_size > 256:
        yield (
            f"takes heads of a multiple of 8 up to 256, but this model's have {head_size}: choose "
            "TRITON_ATTN"
        )
    if FLASH_ATTN in vllm_config.attention_config.backend_per_kind.values():
        yield (
            "cannot be captured for one kind of layers: ask for it by attention_backend, "
            "for all layers"
        )
    asked = vllm_config.cache_config.cache_dtype
    if not is_quantized_kv_cache(asked):
        return
    # Queries are float8 then too.
    if asked not in FLOAT8_CACHES:
        yield f"takes kv_cache_dtype fp8 and fp8_e4m3, got {asked}: choose TRITON_ATTN"
    if version != 3:
        yield (
            f"takes kv_cache_dtype {asked} as FlashAttention 3, but vLLM finds "
            f"FlashAttention {version}: choose TRITON_ATTN"
        )
    if model.dtype != torch.bfloat16:
        yield (
            f"takes kv_cache_dtype {asked} of bfloat16 models, got dtype {dtype}: "
            "choose TRITON_ATTN"
        )
    if head_size % 16:
        yield (
            f"takes kv_cache_dtype {asked} with heads of a multiple of 16, but this "
            f"model's have {head_size}: choose TRITON_ATTN"
        )
