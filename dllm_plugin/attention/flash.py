"""FlashAttention on vLLM's own layout: one row per query segment in CUDA graphs, or two parts.

Captured FlashAttention 3 reads its schedule from a buffer, into which vLLM's builder copies that of
every step, prefills included. vLLM sizes it by requests and graphs, which segments outnumber. What
a graph bakes in is the same at capture and at replay: the number of rows, the longest query (a
canvas or a block), the longest context, and how often keys may be split; all else is read from
tensors.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.kv_cache_interface import AttentionSpec

from dllm_plugin.attention.cascade import CanvasParts
from dllm_plugin.attention.sequence_counts import most_rows
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.kernels.rotate_and_store.kernel import rotate_and_store

# Tokens times splits. Split keys need float32 results for each split, of all tokens: as many as
# vLLM's own largest graph of 512 tokens and 32 splits, where 8,192 tokens would take 16 times that.
SPLIT_TOKENS = 32 * 512


def schedule_size(num_rows: int) -> int:
    """int32 entries of a FlashAttention 3 schedule: at most four per row, and a counter of tiles.

    Rows are counted in fours (``mha_fwd_get_scheduler_metadata`` in FlashAttention's
    ``hopper/flash_api.cpp``, which takes one to four entries, depending on mask and splits).
    """
    return 4 * round_up(num_rows, 4) + 1


@dataclass
class PartsMetadata(FlashAttentionMetadata):
    """vLLM's, where `seq_lens` is the context alone if there are canvas rows.

    positions int64 ``[T]`` of the pass's tokens, for layers that rotate here; None of other models.
    """

    canvas_rows: CanvasParts | None = None
    positions: Tensor | None = None


class SegmentFlashBuilder(FlashAttentionMetadataBuilder):
    """Room for the schedule of every step, and memory for splits that does not grow with graphs.

    Serves any model: vLLM keeps the class of a backend that it has once looked up.
    """

    scheduler_metadata: Tensor

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.most_splits = self.max_num_splits
        if self.use_full_cuda_graph:
            size = schedule_size(_rows_of(vllm_config))
            self.scheduler_metadata = torch.zeros(size, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        canvas_rows: CanvasParts | None = None,
    ) -> PartsMetadata:
        """vLLM's, with the splits that this number of tokens allows; a graph's never changes."""
        allowed = SPLIT_TOKENS // max(common_attn_metadata.num_actual_tokens, 1)
        self.max_num_splits = min(self.most_splits, max(allowed, 1))
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        positions = common_attn_metadata.positions
        return PartsMetadata(**vars(metadata), canvas_rows=canvas_rows, positions=positions)

    def _store_scheduler_metadata(self, scheduler_metadata: Tensor | None) -> Tensor | None:
        """Copy a step's schedule to where graphs read it; vLLM clears what lies behind it."""
        if self.use_full_cuda_graph and scheduler_metadata is not None:
            needed, room = len(scheduler_metadata), len(self.scheduler_metadata)
            assert needed <= room, (
                f"FlashAttention's schedule of this step takes {needed} entries, but `most_rows` "
                f"made room for {room}."
            )
        return super()._store_scheduler_metadata(scheduler_metadata)


def _rows_of(vllm_config: VllmConfig) -> int:
    scheduler = vllm_config.scheduler_config
    requests, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    given = vllm_config.additional_config
    if not isinstance(given, dict) or "dllm" not in given:
        # Another model's, which has one row per request.
        return max(requests, tokens)
    return most_rows(get_decode_config(vllm_config), requests, tokens)


class PartsImpl(FlashAttentionImpl):
    """One layer's attention, of steps in two parts as well.

    rotation: of queries and keys, together with the store; None where the layer has seen to both.
    """

    rotation: RotaryEmbedding | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the pass's tokens ``[T, H, D]`` into `output`."""
        rows = attn_metadata.canvas_rows if isinstance(attn_metadata, PartsMetadata) else None
        if self.rotation is not None and attn_metadata is not None:  # there is none in a profile
            assert isinstance(attn_metadata, PartsMetadata) and attn_metadata.positions is not None
            table, slots = self.rotation.cos_sin_cache, attn_metadata.slot_mapping
            where = (attn_metadata.positions, table, kv_cache, slots)
            turned = query.new_empty(query.shape)
            # Fresh keys are read beside the cache's only where canvases are apart.
            turned_key = None if rows is None else key.new_empty(key.shape)
            rotate_and_store(query, key, value, *where, turned, turned_key)
            query, key = turned, key if turned_key is None else turned_key
        if rows is None:
            rest = (kv_cache, attn_metadata, output, output_scale, output_block_scale)
            return super().forward(layer, query, key, value, *rest)
        assert output_scale is None and output_block_scale is None
        self._forward_in_parts(query, key, value, kv_cache, attn_metadata, rows, output)
        return output

    def _forward_in_parts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        rows: CanvasParts,
        output: Tensor,
    ) -> None:
        """Contexts from the cache, canvases from what the pass has made, merged."""
        # Where there is none, on CPUs, this module is imported all the same.
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        assert self.vllm_flash_attn_version is not None
        num_tokens = attn_metadata.num_actual_tokens
        fresh = (x[:num_tokens].unflatten(0, (-1, rows.length)) for x in (key, value))
        pages = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        # One KV head per rank leaves strides that FlashAttention's bulk copies refuse.
        keys, values, new_keys, new_values = map(
            canonicalize_singleton_dim_strides, (*pages, *fresh)
        )
        both: dict[str, Any] = {
            "q": query[:num_tokens],
            "max_seqlen_q": rows.length,
            "softmax_scale": self.scale,
            "return_softmax_lse": True,
            "fa_version": self.vllm_flash_attn_version,
        }
        context, context_lse = flash_attn_varlen_func(
            k=keys,
            v=values,
            cu_seqlens_q=attn_metadata.query_start_loc,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            block_table=attn_metadata.block_table,
            scheduler_metadata=attn_metadata.scheduler_metadata,
            num_splits=attn_metadata.max_num_splits,
            **both,
        )
        # A canvas is one page.
        canvas, canvas_lse = flash_attn_varlen_func(
            k=new_keys,
            v=new_values,
            cu_seqlens_q=rows.start_loc,
            seqused_k=rows.keys,
            max_seqlen_k=rows.length,
            block_table=rows.request,
            num_splits=1,
            **both,
        )
        merge_attn_states(output[:num_tokens], context, context_lse, canvas, canvas_lse)


class SegmentFlashBackend(FlashAttentionBackend):
    """vLLM's FLASH_ATTN with that builder."""

    @staticmethod
    def get_impl_cls() -> type[PartsImpl]:
        """Per layer."""
        return PartsImpl

    @staticmethod
    def get_builder_cls() -> type[SegmentFlashBuilder]:
        """Per KV cache group."""
        return SegmentFlashBuilder


class RotatingFlashBackend(SegmentFlashBackend):
    """Of layers whose attention rotates, and stores with that: no other model may be given it."""

    forward_includes_kv_cache_update = True
