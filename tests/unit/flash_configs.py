"""Engine configurations and builders of FlashAttention."""

from pathlib import Path

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from dllm_plugin.attention.flash import SegmentFlashBuilder

FLASH, TRITON = AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN
SPEC = FullAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
)


def config_with_graphs(checkpoints: Path) -> VllmConfig:
    """The configuration of an engine with full CUDA graphs."""
    config = EngineArgs(
        str(checkpoints / "tiny-sdar"), dtype="bfloat16"
    ).create_engine_config()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.max_cudagraph_capture_size = 512
    return config


def builder_of(config: VllmConfig) -> SegmentFlashBuilder:
    return SegmentFlashBuilder(SPEC, ["x"], config, torch.device("cpu"))
