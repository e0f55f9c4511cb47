"""Serve the `distinct` KV layout: keys in pieces of 16 bytes, values along tokens.

A page keeps the size that vLLM gives it, and a KV head its place in the page; only what lies inside
is ordered differently (:mod:`dllm_plugin.kernels.paged_store`). Prefix caching,
preemption and whatever else moves whole pages see no difference. GPUs run Triton kernels, CPUs the
plain-torch reference implementation.

One kernel serves prompts and canvases alike. A request is one span of fresh positions, and one
integer per token counts the keys that the token sees (:meth:`SpanBuffers.fill`). That
covers a bidirectional prompt, blocks from the prompt or on an absolute grid, ragged blocks and the
dual cache without a mask tensor. The launch grid depends only on numbers of tokens and requests,
so one captured graph serves every length.

Learned from experience: earlier kernels of this kind (D2F-vLLM, Diffulex) never gave correct
results or could not run some models. Each of their failures is a named case of `tests/spans.py`,
which every kernel is checked on: contexts that are an exact multiple of the page, pages larger or
smaller than a key tile, offsets beyond the first page, fresh keys of the second request, borders of
each request in a batch, masks reused between batches of one shape, query lengths that no block
divides, a bidirectional prompt, seven query heads per KV head, KV heads times head size that are no
power of two, a forward that stores nothing, outputs that were not written.

Compute what each token of a forward sees, as the kernels of the `distinct` layout read it.

Under that layout a request stays one sequence: a span of fresh positions. R requests, B query
segments, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import (
    KVCacheLayout,
    KVCacheSpec,
    is_quantized_kv_cache,
)
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm_plugin.kernels import paged_store
from dllm_plugin.kernels.paged_attention import kernel as attention_kernel
from dllm_plugin.kernels.paged_attention import reference as attention_reference

from .backends import HEAD_SIZES, PAGE_UNIT
from .kv_groups import ExtraArguments, KVGroups

PAGE = 64  # one tile of keys


@dataclass
class DistinctMetadata(AttentionMetadata):
    """List what one forward of one KV cache group needs; R requests, T tokens.

    query_start_loc  int32 [R + 1]
    span_start       int32 [R], absolute position of each request's first token
    keys_seen        int32 [T], each token sees the keys [0, keys_seen)
    block_table      int32 [R, W]
    max_query_len    upper bound on the tokens of a request
    """

    query_start_loc: Tensor
    span_start: Tensor
    keys_seen: Tensor
    block_table: Tensor
    max_query_len: int


class DistinctMetadataBuilder(AttentionMetadataBuilder[DistinctMetadata]):
    """Hand tensors on; their owner keeps them in place for captured graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    # vLLM's is abstract.
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        span_start: Tensor | None = None,
        keys_seen: Tensor | None = None,
    ) -> DistinctMetadata:
        """Build the metadata of one forward.

        The last two arguments come from :meth:`SpanBuffers.fill`.
        """
        assert span_start is not None and keys_seen is not None
        return DistinctMetadata(
            query_start_loc=common_attn_metadata.query_start_loc,
            span_start=span_start,
            keys_seen=keys_seen,
            block_table=common_attn_metadata.block_table_tensor,
            max_query_len=common_attn_metadata.max_query_len,
        )


class DistinctImpl(AttentionImpl[DistinctMetadata]):
    """Compute the attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        unsupported = {
            "alibi slopes": alibi_slopes,
            "sliding windows": sliding_window,
            "logits soft caps": logits_soft_cap,
            "encoder layers": attn_type != AttentionType.DECODER,
            "KV sharing": kv_sharing_target_layer_name,
            "quantised keys": is_quantized_kv_cache(kv_cache_dtype),
        } | extra
        for what, value in unsupported.items():
            if value:
                raise ValueError(
                    f"kv_cache_layout 'distinct' does not support {what}; use kv_cache_layout "
                    "'unified'."
                )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.attend: Callable[..., None]
        if current_platform.is_cpu():
            self.store = paged_store.store_kv_reference
            self.attend = attention_reference.attend_spans
        else:
            units = current_platform.num_compute_units()
            self.store = paged_store.store_kv
            self.attend = partial(attention_kernel.attend_spans, num_units=units)

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Store the forward's keys and values ``[T, K, D]``; a slot of -1 is not stored."""
        self.store(
            key,
            value,
            *paged_store.split_cache(kv_cache, self.head_size),
            slot_mapping,
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: DistinctMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of the forward's tokens ``[T, H, D]`` to `output`."""
        assert output_scale is None and output_block_scale is None
        if attn_metadata is None:  # vLLM profiles memory with forwards that have none
            return output.zero_()
        self.attend(
            query,
            key,
            value,
            *paged_store.split_cache(kv_cache, self.head_size),
            attn_metadata.query_start_loc,
            attn_metadata.span_start,
            attn_metadata.keys_seen,
            attn_metadata.block_table,
            self.scale,
            output,
            attn_metadata.max_query_len,
        )
        return output


class DistinctBackend(AttentionBackend):
    """Answer what vLLM asks about the layout before it builds a model."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
    ]

    @staticmethod
    def get_name() -> str:
        """Return vLLM's name for backends from outside."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[DistinctImpl]:
        """Return the class of which vLLM makes one object per layer."""
        return DistinctImpl

    @staticmethod
    def get_builder_cls() -> type[DistinctMetadataBuilder]:
        """Return the class of which vLLM makes one object per KV cache group."""
        return DistinctMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Return the page sizes that the kernels support."""
        return [MultipleOf(PAGE_UNIT)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the page size if the user gives none: whole tiles of keys."""
        return max(PAGE, -(-default_block_size // PAGE) * PAGE)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the head sizes that the kernels support."""
        return list(HEAD_SIZES)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout that keeps each head's share of a page in one piece."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True: one integer per token counts the keys it sees."""
        return True


class SpanBuffers:
    """Build metadata with one sequence per request; own what captured CUDA graphs read."""

    def __init__(
        self, max_num_reqs: int, max_num_tokens: int, device: torch.device
    ) -> None:
        self.start_R = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.seen_T = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)

    def build(
        self,
        batch: InputBatch,
        is_full: bool,
        segments: tuple[Tensor, Tensor],
        groups: KVGroups,
    ) -> dict[str, Any]:
        """Build the metadata of one step; with `is_full` for a captured graph, padding included.

        Args:
            segments: int32 ``[B + 1]``, first token of each; int32 ``[B]``, number of keys that
                each sees. Segments may be empty.
        """
        num_reqs = batch.num_reqs
        num_tokens = batch.num_tokens
        if is_full:
            num_reqs = batch.num_reqs_after_padding
            num_tokens = batch.num_tokens_after_padding
        query_start_loc = batch.query_start_loc[: num_reqs + 1]
        starts_np = batch.query_start_loc_np[: num_reqs + 1]
        query_start_loc_cpu = torch.from_numpy(starts_np)
        stop_R = batch.seq_lens[:num_reqs]
        spans = self.fill(*segments, query_start_loc, stop_R, num_tokens)
        return build_attn_metadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            query_start_loc_gpu=query_start_loc,
            query_start_loc_cpu=query_start_loc_cpu,
            max_query_len=batch.max_query_len or int(query_start_loc_cpu.diff().max()),
            seq_lens=batch.seq_lens,
            causal=False,
            model_specific_attn_metadata=ExtraArguments(**spans),
            **groups._asdict(),
        )

    def fill(
        self,
        segment_start_loc: Tensor,
        segment_keys: Tensor,
        query_start_loc: Tensor,
        stop_R: Tensor,
        num_tokens: int,
    ) -> dict[str, Tensor]:
        """Compute the spans of one step on the device; tokens of no segment see nothing.

        Returns span_start int32 ``[R]``, absolute position of each request's first token, and
        keys_seen int32 ``[T]``: a token sees the keys ``[0, keys_seen)`` of its request.

        Args:
            stop_R: int32, absolute position after each request's last token.
        """
        token_T = torch.arange(num_tokens, dtype=torch.int32, device=self.seen_T.device)
        segment_T = torch.searchsorted(segment_start_loc[1:], token_T, right=True)
        keys = torch.nn.functional.pad(segment_keys, (0, 1))
        seen_T = self.seen_T[:num_tokens]
        torch.index_select(keys, 0, segment_T, out=seen_T)
        start_R = self.start_R[: len(stop_R)]
        torch.sub(stop_R, query_start_loc.diff(), out=start_R)
        return {"span_start": start_R, "keys_seen": seen_T}
