"""Run FlashAttention on vLLM's own layout: one sequence per query segment, or a cascade.

Of models that store their blocks causally, some sequences of a step attend causally and others do
not, while FlashAttention 3 takes one mask a call. Such a step takes two calls of all queries. In
each, sequences of the other kind see no keys, for which FlashAttention writes zeros.

Captured FlashAttention 3 reads its schedule from a buffer, into which vLLM's builder copies that of
every step, prefills included. vLLM sizes the buffer by requests and graphs; a step has more query
segments than that, so our builder makes a larger one.

A CUDA graph fixes these numbers: how many sequences there are, the longest query (a canvas or a
block), the longest context, and how often keys may be split. They are the same at capture and at
replay. Everything else is read from tensors.
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
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.kv_cache_interface import AttentionSpec, is_quantized_kv_cache

from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.kernels.rotate_and_store import FLOAT8, rotate_and_store

from .cascade import CanvasSuffix
from .prefills import max_sequences

# Limit of tokens times splits: each split stores float32 results of all tokens. It is what vLLM's
# own largest graph needs, 512 tokens in 32 splits; 8,192 tokens would take 16 times that.
SPLIT_TOKENS = 32 * 512


def schedule_size(num_sequences: int) -> int:
    """Return how many int32 entries a FlashAttention 3 schedule has at most.

    There are one to four entries per sequence, depending on mask and splits, and one counter of
    tiles; the number of sequences is rounded up to a multiple of four
    (``mha_fwd_get_scheduler_metadata`` in FlashAttention's ``hopper/flash_api.cpp``).
    """
    return 4 * round_up(num_sequences, 4) + 1


@dataclass
class SegmentFlashMetadata(FlashAttentionMetadata):
    """Extend vLLM's metadata by what two masks, a cascade and a deferred rotation need.

    bidirectional: the sequences that attend in both directions, if vLLM's fields describe the
    causal sequences only; None if all sequences have one mask.
    canvas_suffix: the suffix of a cascade; vLLM's fields then describe only the prefix, so
    `seq_lens` are the contexts. None without a cascade.
    positions: int64 ``[T]`` of the forward's tokens, for layers that rotate here; None if the
    runner hands none over.
    """

    bidirectional: FlashAttentionMetadata | None = None
    canvas_suffix: CanvasSuffix | None = None
    positions: Tensor | None = None


class SegmentFlashBuilder(FlashAttentionMetadataBuilder):
    """Build metadata with buffers for the schedules of every step, and with bounded splits.

    It serves any model, since vLLM caches the class of a backend that it has looked up once.
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
        self.splits_limit = self.max_num_splits
        sequences = _max_sequences_of(vllm_config)
        size = schedule_size(sequences)
        self.scheduler_metadata = torch.zeros(size, dtype=torch.int32, device=device)
        # Of the sequences that attend in both directions.
        self.second_schedule = torch.zeros_like(self.scheduler_metadata)
        self.causal_lens = self.scheduler_metadata.new_zeros(sequences)
        self.bidirectional_lens = torch.zeros_like(self.causal_lens)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        canvas_suffix: CanvasSuffix | None = None,
    ) -> SegmentFlashMetadata:
        """Build vLLM's metadata with as many splits as this number of tokens allows.

        A graph always has the same number of tokens, and so the same number of splits.
        """
        allowed = SPLIT_TOKENS // max(common_attn_metadata.num_actual_tokens, 1)
        self.max_num_splits = min(self.splits_limit, max(allowed, 1))
        bidirectional = None
        common = common_attn_metadata
        # FlashAttention 4 reads such a tensor itself.
        if isinstance(common.causal, Tensor) and get_flash_attn_version() != 4:
            common, others = self._by_mask(common, common.causal)
            bidirectional = self._build_second(others, fast_build)
        metadata = super().build(common_prefix_len, common, fast_build)
        return SegmentFlashMetadata(
            **vars(metadata),
            bidirectional=bidirectional,
            canvas_suffix=canvas_suffix,
            positions=common.positions,
        )

    def _by_mask(
        self, common: "CommonAttentionMetadata", causal: Tensor
    ) -> tuple["CommonAttentionMetadata", "CommonAttentionMetadata"]:
        """Return the causal sequences, and the others: those of the other kind see no keys."""
        lens = common.seq_lens
        causal_lens = self.causal_lens[: len(lens)]
        others = self.bidirectional_lens[: len(lens)]
        torch.mul(lens, causal, out=causal_lens)
        torch.sub(lens, causal_lens, out=others)
        return (
            common.replace(seq_lens=causal_lens, causal=True),
            common.replace(seq_lens=others, causal=False),
        )

    def _build_second(
        self, common: "CommonAttentionMetadata", fast_build: bool
    ) -> FlashAttentionMetadata:
        """Build vLLM's metadata with the second buffer for its schedule."""
        first = self.scheduler_metadata
        self.scheduler_metadata = self.second_schedule
        metadata = super().build(0, common, fast_build)
        self.scheduler_metadata = first
        return metadata

    def _store_scheduler_metadata(
        self, scheduler_metadata: Tensor | None
    ) -> Tensor | None:
        """Copy a step's schedule into the buffer that graphs read; vLLM clears the rest of it."""
        if self.use_full_cuda_graph and scheduler_metadata is not None:
            needed = len(scheduler_metadata)
            size = len(self.scheduler_metadata)
            assert needed <= size, (
                f"FlashAttention's schedule of this step takes {needed} entries, but the buffer "
                f"sized by `max_sequences` has room for {size}."
            )
        return super()._store_scheduler_metadata(scheduler_metadata)


def _max_sequences_of(vllm_config: VllmConfig) -> int:
    scheduler = vllm_config.scheduler_config
    requests = scheduler.max_num_seqs
    tokens = scheduler.max_num_batched_tokens
    given = vllm_config.additional_config
    if not isinstance(given, dict) or "dllm" not in given:
        # The configuration of another model, which has one sequence per request.
        return max(requests, tokens)
    return max_sequences(get_decode_config(vllm_config), requests, tokens)


class SegmentFlashImpl(FlashAttentionImpl):
    """Compute the attention of one layer, by two masks or with a cascade as the metadata says.

    rotation: rotates queries and keys here, in the kernel that stores keys and values; None if
    the layer rotates before, and vLLM stores.
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
        """Write the attention of the forward's tokens ``[T, H, D]`` to `output`."""
        ours = (
            attn_metadata if isinstance(attn_metadata, SegmentFlashMetadata) else None
        )
        suffix = None if ours is None else ours.canvas_suffix
        # Memory profiles have none.
        if self.rotation is not None and attn_metadata is not None:
            assert ours is not None
            query, key = self._rotate(layer, query, key, value, kv_cache, ours)
        if suffix is None:
            rest = (kv_cache, attn_metadata, output, output_scale, output_block_scale)
            super().forward(layer, query, key, value, *rest)
            if ours is not None and ours.bidirectional is not None:
                others = torch.empty_like(output)
                second = (kv_cache, ours.bidirectional, others)
                super().forward(layer, query, key, value, *second)
                count = ours.num_actual_tokens
                output[:count].add_(others[:count])
            return output
        assert output_scale is None and output_block_scale is None
        self._forward_cascade(
            query, key, value, kv_cache, attn_metadata, suffix, output
        )
        return output

    def _rotate(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        metadata: SegmentFlashMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Rotate and store; return queries, float8 if the cache is, and keys.

        Without a cascade keys come back as they were: attention reads the cache.
        """
        assert self.rotation is not None and metadata.positions is not None
        dtype = query.dtype
        scales = None
        if is_quantized_kv_cache(self.kv_cache_dtype):
            # Read in every forward: loading weights replaces scales of heads.
            scales = (layer._q_scale, layer._k_scale, layer._v_scale)
            dtype = FLOAT8
        rotated = query.new_empty(query.shape, dtype=dtype)
        # Only a cascade reads fresh keys from anywhere but the cache.
        has_suffix = metadata.canvas_suffix is not None
        fresh = key.new_empty(key.shape) if has_suffix else None
        rotate_and_store(
            query,
            key,
            value,
            metadata.positions,
            self.rotation.cos_sin_cache,
            kv_cache,
            metadata.slot_mapping,
            rotated,
            fresh,
            scales,
        )
        return rotated, key if fresh is None else fresh

    def _forward_cascade(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        suffix: CanvasSuffix,
        output: Tensor,
    ) -> None:
        """Attend to contexts in the cache and to fresh canvas keys, and merge both results."""
        # Imported here: CPUs import this module but have no FlashAttention.
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        assert self.vllm_flash_attn_version is not None
        num_tokens = attn_metadata.num_actual_tokens
        fresh = (x[:num_tokens].unflatten(0, (-1, suffix.length)) for x in (key, value))
        pages = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        # One KV head per rank leaves strides that FlashAttention's bulk copies refuse.
        keys, values, new_keys, new_values = map(
            canonicalize_singleton_dim_strides, (*pages, *fresh)
        )
        shared: dict[str, Any] = {
            "q": query[:num_tokens],
            "max_seqlen_q": suffix.length,
            "softmax_scale": self.scale,
            "return_softmax_lse": True,
            "fa_version": self.vllm_flash_attn_version,
        }
        prefix_out, prefix_lse = flash_attn_varlen_func(
            k=keys,
            v=values,
            cu_seqlens_q=attn_metadata.query_start_loc,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            block_table=attn_metadata.block_table,
            scheduler_metadata=attn_metadata.scheduler_metadata,
            num_splits=attn_metadata.max_num_splits,
            **shared,
        )
        # Each canvas is a page: a block table of one entry, the request, leads to it.
        suffix_out, suffix_lse = flash_attn_varlen_func(
            k=new_keys,
            v=new_values,
            cu_seqlens_q=suffix.start_loc,
            seqused_k=suffix.keys,
            max_seqlen_k=suffix.length,
            block_table=suffix.request,
            num_splits=1,
            **shared,
        )
        merge_attn_states(
            output[:num_tokens], prefix_out, prefix_lse, suffix_out, suffix_lse
        )


class SegmentFlashBackend(FlashAttentionBackend):
    """Extend vLLM's FLASH_ATTN by our builder and implementation."""

    @staticmethod
    def get_impl_cls() -> type[SegmentFlashImpl]:
        """Return the class of which vLLM makes one object per layer."""
        return SegmentFlashImpl

    @staticmethod
    def get_builder_cls() -> type[SegmentFlashBuilder]:
        """Return the class of which vLLM makes one object per KV cache group."""
        return SegmentFlashBuilder


class RotatingFlashBackend(SegmentFlashBackend):
    """Store keys and values inside of attention, for layers whose rotation is deferred.

    No other layer may have this backend: vLLM would leave the store to it, and nobody would store.
    """

    forward_includes_kv_cache_update = True
