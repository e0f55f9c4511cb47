"""Pass arguments of a step to the metadata builder of each KV cache group; clear pages."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata
from vllm.v1.worker.utils import AttentionGroup


class KVGroups(NamedTuple):
    """List arguments of vLLM's `build_attn_metadata` that all steps pass, under vLLM's names.

    max_seq_len, the context; positions int64 ``[tokens]``; block_tables int32
    ``[requests, pages]``, one per group; slot_mappings int64 ``[groups, tokens]``.
    """

    max_seq_len: int
    positions: Tensor
    block_tables: Sequence[Tensor]
    slot_mappings: Tensor
    attn_groups: list[list[AttentionGroup]]
    kv_cache_config: KVCacheConfig


class ExtraArguments(ModelSpecificAttnMetadata):
    """Hand further arguments to the `build` of our metadata builders, alike for every group."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def get_extra_attn_kwargs(
        self, attn_metadata_builder: Any, num_reqs: int
    ) -> dict[str, Any]:
        """Return the same arguments for every KV cache group."""
        return self.arguments


def clear_pages(
    vllm_config: VllmConfig, pages: Sequence[int], device: torch.device
) -> None:
    """Write zeros into some pages of every layer, in the order of the stream.

    Kernels may cut a page into several: then as many rows of a layer's cache are one page.
    """
    num_pages = vllm_config.cache_config.num_gpu_blocks
    if not pages or not num_pages:
        return
    for layer in get_layers_from_vllm_config(vllm_config, Attention).values():
        cache = layer.kv_cache.view(torch.uint8)
        rows = cache.shape[0] // num_pages
        index_np = np.array(pages)[:, None] * rows + np.arange(rows)
        index_np = index_np.reshape(-1)
        cache.index_fill_(0, async_tensor_h2d(index_np, device=device), 0)
