"""Segments -> attention rows -> vLLM's attention metadata.

Every query segment becomes one row of ordinary variable-length attention without a causal mask:
its own ``query_start_loc``, ``seq_lens`` = the keys it sees, and the block table row of its
request. B is the number of rows. Under the `distinct` KV layout a request stays one row, and the
same segments say what each of its tokens sees.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import AttentionGroup

from dllm_plugin.layouts.spans import SpanBuffers
from dllm_plugin.row_counts import most_rows, rows_per_canvas
from dllm_plugin.rows import count_canvases
from dllm_plugin.states import CanvasStates
from dllm_plugin.strategies import canvas_segments, prefill_segments


class Rows(NamedTuple):
    """Attention rows on the host.

    request_B int64, index in the batch; length_B int64, queries of the row;
    behind_B int64, how many positions of the request's span lie behind the row's keys; negative
    where keys behind the span were computed earlier.
    """

    request_B: np.ndarray
    length_B: np.ndarray
    behind_B: np.ndarray


def _rows(first_request: int, stops: np.ndarray, starts: np.ndarray, spans: np.ndarray) -> Rows:
    lengths = np.diff(stops, axis=1, prepend=starts[:, None])
    request = np.repeat(np.arange(first_request, first_request + len(stops)), stops.shape[1])
    behind = (starts + spans)[:, None] - stops
    return Rows(request, lengths.ravel(), behind.ravel())


def batch_rows(batch: InputBatch, states: CanvasStates, keep_empty: bool) -> Rows:
    """Rows of a batch: canvases first, then prefills, in the runner's order.

    With `keep_empty` every request is a canvas and all its segments are kept, so that the number
    of rows depends on the number of requests alone, as a CUDA graph needs it.
    """
    spans = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])
    lengths = states.block_length.np[batch.idx_mapping_np[: batch.num_reqs]]
    blocks = states.full_NS.shape[1]
    zeros = np.zeros_like(spans)
    if keep_empty:
        return _rows(0, canvas_segments(spans, lengths, blocks), zeros, spans)
    if states.config.full_attention:
        return _whole_rows(batch, states, spans)
    num_canvases = count_canvases(batch)
    parts = []
    if num_canvases:
        canvas, length = spans[:num_canvases], lengths[:num_canvases]
        stops = canvas_segments(canvas, length, blocks)
        parts.append(_rows(0, stops, zeros[:num_canvases], canvas))
    if num_canvases < batch.num_reqs:
        rest = slice(num_canvases, batch.num_reqs)
        starts = batch.num_computed_tokens_np[rest].astype(np.int64)
        origin = states.origin.np[batch.idx_mapping_np[rest]]
        # Warm-up steps also run requests that are neither prefills nor canvases: one segment.
        origin = np.where(batch.is_prefilling_np[rest], origin, starts + spans[rest])
        stops = prefill_segments(origin, starts + spans[rest], lengths[rest])
        parts.append(_rows(num_canvases, np.maximum(stops, starts[:, None]), starts, spans[rest]))
    rows = Rows(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    filled = rows.length_B > 0
    return Rows(*(part[filled] for part in rows))


def _whole_rows(batch: InputBatch, states: CanvasStates, spans: np.ndarray) -> Rows:
    """Full attention: one row per request, which sees its whole canvas, computed or kept."""
    num_reqs, canvases = batch.num_reqs, count_canvases(batch)
    reached = batch.num_computed_tokens_np[:num_reqs].astype(np.int64) + spans
    stops = reached.copy()
    if canvases:
        drafts = batch.num_draft_tokens_per_req
        assert drafts is not None
        slots, starts = batch.idx_mapping_np[:canvases], reached[:canvases] - drafts[:canvases]
        stops[:canvases] = states.bounds_np(slots, starts).stop
    return Rows(np.arange(num_reqs), spans, reached - stops)


class AttentionRows:
    """Builds attention metadata; owns the buffers that captured CUDA graphs read."""

    def __init__(self, states: CanvasStates, max_num_reqs: int, max_num_tokens: int) -> None:
        self.states = states
        self.spans: SpanBuffers | None = None
        if states.config.kv_cache_layout == "distinct":
            self.spans = SpanBuffers(max_num_reqs, max_num_tokens, states.device)
        self.rows_per_request = rows_per_canvas(states.config)
        # A graph replays any block length, and kernels are chosen by the longest. Two at least, as
        # FlashAttention 2 takes one to mean that every row has one query.
        self.graph_query_len = max(states.canvas_NC.shape[1], 2)
        self.most_rows = most_rows(states.config, max_num_reqs, max_num_tokens)
        max_rows = max_num_reqs * self.rows_per_request
        self.query_start_loc = torch.zeros(max_rows + 1, dtype=torch.int32, device=states.device)
        self.seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=states.device)
        self.block_tables: list[Tensor] = []

    def build(
        self,
        batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool,
    ) -> dict[str, Any]:
        """Metadata of one step for vLLM's attention backends."""
        # Capture announces itself by `for_capture` alone; its mode argument is NONE.
        is_full = for_capture or cudagraph_mode == CUDAGraphMode.FULL
        rows = batch_rows(batch, self.states, keep_empty=is_full)
        num_rows = len(rows.length_B)
        num_tokens = batch.num_tokens
        if is_full:
            num_rows = batch.num_reqs_after_padding * self.rows_per_request
            num_tokens = batch.num_tokens_after_padding
        assert num_rows <= self.most_rows, (
            f"{num_rows} attention rows in a step of {num_tokens} tokens and {batch.num_reqs} "
            f"requests; backends have room for {self.most_rows}."
        )
        packed = np.zeros((3, num_rows + 1), dtype=np.int32)
        used = len(rows.length_B)
        packed[0, 1 : used + 1] = np.cumsum(rows.length_B)
        packed[0, used + 1 :] = packed[0, used]
        packed[1, :used] = rows.request_B
        packed[2, :used] = rows.behind_B
        packed[2, used:] = np.iinfo(np.int32).max
        device_rows = async_tensor_h2d(packed, device=self.states.device)
        request_B = device_rows[1, :num_rows].to(torch.int64)
        seq_lens = (batch.seq_lens[request_B] - device_rows[2, :num_rows]).clamp_min(0)
        if self.spans is not None:
            segments, limit = (device_rows[0], seq_lens), self.states.max_model_len
            rest = (block_tables, slot_mappings, attn_groups, kv_cache_config)
            return self.spans.build(batch, is_full, segments, limit, *rest)
        tables = [table.index_select(0, request_B) for table in block_tables]
        query_start_loc = device_rows[0]
        if is_full:
            query_start_loc = self.query_start_loc[: num_rows + 1].copy_(query_start_loc)
            seq_lens = self.seq_lens[:num_rows].copy_(seq_lens)
            tables = self._persistent(tables)
        return build_attn_metadata(
            attn_groups=attn_groups,
            num_reqs=num_rows,
            num_tokens=num_tokens,
            query_start_loc_gpu=query_start_loc,
            query_start_loc_cpu=torch.from_numpy(packed[0]),
            max_query_len=self.graph_query_len if is_full else int(rows.length_B.max()),
            seq_lens=seq_lens,
            max_seq_len=self.states.max_model_len,
            block_tables=tables,
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            for_cudagraph_capture=for_capture,
            causal=False,
        )

    def _persistent(self, tables: list[Tensor]) -> list[Tensor]:
        if [table.shape[1] for table in tables] != [buf.shape[1] for buf in self.block_tables]:
            # The first time, and if the context was lowered behind vLLM's profile of graph memory.
            rows = self.seq_lens.shape[0]
            self.block_tables = [table.new_zeros(rows, table.shape[1]) for table in tables]
        return [
            buffer[: len(table)].copy_(table)
            for buffer, table in zip(self.block_tables, tables, strict=True)
        ]
