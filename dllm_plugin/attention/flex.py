"""Run FlexAttention on vLLM's own layout, with buffers for one sequence per query segment.

This is the readable reference path of GPUs: what a token sees is a mask function, not an integer in
a kernel. Two things differ from vLLM's builder. Its buffers have room for one sequence per
request, and a step has more query segments than requests. And our steps cannot be captured.
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
    """Build metadata with buffers for one sequence per token: a step never has more.

    vLLM then keeps 8 bytes per token of a step and page of the cache: lower
    `max_num_batched_tokens` or the cache if the buffers do not fit.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        widened = copy.copy(vllm_config)
        widened.scheduler_config = copy.copy(vllm_config.scheduler_config)
        widened.scheduler_config.max_num_seqs = (
            vllm_config.scheduler_config.max_num_batched_tokens
        )
        super().__init__(kv_cache_spec, layer_names, widened, device)


class SegmentFlexBackend(FlexAttentionBackend):
    """Extend vLLM's FLEX_ATTENTION by that builder."""

    @staticmethod
    def get_builder_cls() -> type[SegmentFlexBuilder]:
        """Return the class of which vLLM makes one object per KV cache group."""
        return SegmentFlexBuilder
