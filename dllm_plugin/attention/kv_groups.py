"""Name what vLLM's runner prepares for each KV cache group of a step."""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.utils import AttentionGroup


class KVGroups(NamedTuple):
    """Hold arguments of vLLM's `build_attn_metadata`, under the names that it gives them.

    block_tables int32 ``[requests, pages]``, one per group; slot_mappings int64
    ``[groups, tokens]``.
    """

    block_tables: "tuple[Tensor, ...] | list[Tensor]"
    slot_mappings: Tensor
    attn_groups: "list[list[AttentionGroup]]"
    kv_cache_config: "KVCacheConfig"
