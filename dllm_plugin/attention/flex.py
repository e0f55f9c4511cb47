"""FlexAttention on vLLM's own layout, with room for one row per query segment.

The readable reference path of GPUs: what a token sees is a mask function there, not an integer in a
kernel. vLLM's builder keeps buffers of one row per request, which segments outnumber, and cannot
be captured from our rows; both are said here, the rest is vLLM's.
"""

import copy
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flex_attention import (
    FlexAttentionBackend,
    FlexAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec


class SegmentFlexBuilder(FlexAttentionMetadataBuilder):
    """A step has at most one segment per token.

    vLLM then keeps 8 bytes per token of a step and page of the cache: lower
    `max_num_batched_tokens` or the cache where that does not fit.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        roomy = copy.copy(vllm_config)
        roomy.scheduler_config = copy.copy(vllm_config.scheduler_config)
        roomy.scheduler_config.max_num_seqs = vllm_config.scheduler_config.max_num_batched_tokens
        super().__init__(kv_cache_spec, layer_names, roomy, device)


class SegmentFlexBackend(FlexAttentionBackend):
    """vLLM's FLEX_ATTENTION with that builder."""

    @staticmethod
    def get_builder_cls() -> type[SegmentFlexBuilder]:
        """Per KV cache group."""
        return SegmentFlexBuilder
