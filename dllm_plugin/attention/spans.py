"""Compute what each token of a forward sees, as the kernels of the `distinct` layout read it.

Under that layout a request stays one sequence: a span of fresh positions. R requests, B query
segments, T tokens.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata

from dllm_plugin.attention.kv_groups import KVGroups

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class Spans(ModelSpecificAttnMetadata):
    """Describe the spans of a step, for the backend's metadata builder.

    span_start int32 ``[R]``, absolute position of each request's first token;
    keys_seen int32 ``[T]``: a token sees the keys ``[0, keys_seen)`` of its request.
    """

    def __init__(self, span_start: Tensor, keys_seen: Tensor) -> None:
        self.tensors = {"span_start": span_start, "keys_seen": keys_seen}

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        """Return the same arguments for every KV cache group."""
        return self.tensors


class SpanBuffers:
    """Build metadata with one sequence per request; own what captured CUDA graphs read."""

    def __init__(self, max_num_reqs: int, max_num_tokens: int, device: torch.device) -> None:
        self.token_T = torch.arange(max_num_tokens, dtype=torch.int32, device=device)
        self.start_R = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.seen_T = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)

    def build(
        self,
        batch: "InputBatch",
        is_full: bool,
        segments: tuple[Tensor, Tensor],
        max_seq_len: int,
        groups: KVGroups,
    ) -> dict[str, Any]:
        """Build the metadata of one step; with `is_full` for a captured graph, padding included.

        Args:
            segments: int32 ``[B + 1]``, first token of each; int32 ``[B]``, number of keys that
                each sees. Segments may be empty.
        """
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        if is_full:
            num_reqs, num_tokens = batch.num_reqs_after_padding, batch.num_tokens_after_padding
        query_start_loc = batch.query_start_loc[: num_reqs + 1]
        query_start_loc_cpu = torch.from_numpy(batch.query_start_loc_np[: num_reqs + 1])
        return build_attn_metadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            query_start_loc_gpu=query_start_loc,
            query_start_loc_cpu=query_start_loc_cpu,
            max_query_len=batch.max_query_len or int(query_start_loc_cpu.diff().max()),
            seq_lens=batch.seq_lens,
            max_seq_len=max_seq_len,
            causal=False,
            model_specific_attn_metadata=self.fill(
                *segments, query_start_loc, batch.seq_lens[:num_reqs], num_tokens
            ),
            **groups._asdict(),
        )

    def fill(
        self,
        segment_start_loc: Tensor,
        segment_keys: Tensor,
        query_start_loc: Tensor,
        stop_R: Tensor,
        num_tokens: int,
    ) -> Spans:
        """Compute the spans of one step on the device; tokens of no segment see nothing.

        Args:
            stop_R: int32, absolute position behind each request's last token.
        """
        token_T = self.token_T[:num_tokens]
        segment_T = torch.searchsorted(segment_start_loc[1:], token_T, right=True)
        keys = torch.nn.functional.pad(segment_keys, (0, 1))
        seen_T = torch.index_select(keys, 0, segment_T, out=self.seen_T[:num_tokens])
        start_R = self.start_R[: len(stop_R)]
        torch.sub(stop_R, query_start_loc.diff(), out=start_R)
        return Spans(start_R, seen_T)
