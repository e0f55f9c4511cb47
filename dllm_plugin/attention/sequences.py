"""Segments -> attention rows -> vLLM's attention metadata.

Every query segment becomes one row of ordinary variable-length attention without a causal mask:
its own ``query_start_loc``, ``seq_lens`` = the keys it sees, and the block table row of its
request. B is the number of rows. Captured steps may read contexts once for all rows of a canvas
(:mod:`layouts.parts`). Under the `distinct` KV layout a request stays one row, and the same
segments say what each of its tokens sees.
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

from dllm_plugin.attention.cascade import PartsBuffers
from dllm_plugin.attention.sequence_counts import most_rows, rows_per_canvas
from dllm_plugin.attention.spans import SpanBuffers
from dllm_plugin.decoding.segments import canvas_segments, prefill_segments
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases


class RowTensors(NamedTuple):
    """Attention rows as backends take them.

    query_start_loc int32 [B + 1], starts_cpu the same on the host; seq_lens int32 [B]; tables int32
    [B, pages], one for each KV cache group; longest, a bound on the queries of a row.
    """

    query_start_loc: Tensor
    starts_cpu: Tensor
    seq_lens: Tensor
    tables: list[Tensor]
    longest: int


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


def batch_rows(batch: InputBatch, states: CanvasStates) -> Rows:
    """Rows of a batch, none empty: canvases first, then prefills, in the runner's order."""
    spans = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])
    lengths = states.block_length.np[batch.idx_mapping_np[: batch.num_reqs]]
    blocks = states.full_NS.shape[1]
    zeros = np.zeros_like(spans)
    if states.config.method.full_attention:
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

    def __init__(
        self,
        states: CanvasStates,
        max_num_reqs: int,
        max_num_tokens: int,
        parts_from: int | None = None,
    ) -> None:
        """`parts_from`: captured steps of so many requests read each context once; None: none."""
        self.states = states
        self.spans: SpanBuffers | None = None
        if states.config.kv_cache_layout == "distinct":
            self.spans = SpanBuffers(max_num_reqs, max_num_tokens, states.device)
        self.rows_per_request = rows_per_canvas(states.config)
        self.most_rows = most_rows(states.config, max_num_reqs, max_num_tokens)
        self.canvas_length = states.canvas_NC.shape[1]
        max_rows = max_num_reqs * self.rows_per_request
        self.query_start_loc = torch.zeros(max_rows + 1, dtype=torch.int32, device=states.device)
        self.seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=states.device)
        self.parts: PartsBuffers | None = None
        self.parts_from = parts_from
        if parts_from is not None:
            sizes = (max_num_reqs, self.rows_per_request, self.canvas_length)
            self.parts = PartsBuffers(*sizes, states.device)
        self.block_tables: list[Tensor] = []
        # What each request is fed in captured steps.
        self.captured_lengths = (self.canvas_length, states.config.block_length)
        # What the buffers are laid out for: positions fed, requests with padding, block lengths,
        # and whose they are, since vLLM's sleep mode may take buffers where no request is left.
        self.layout: tuple[int, int, bytes, tuple[str, ...]] = (0, 0, b"", ())
        self.starts_cpu = torch.zeros(1, dtype=torch.int32)
        self.behind_RS = self.seq_lens.new_zeros(0, self.rows_per_request)

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
        whole = batch.num_tokens == batch.num_reqs * self.canvas_length
        fewest = self.parts_from if is_full and whole else None
        in_parts = fewest is not None and batch.num_reqs_after_padding >= fewest
        # The other layout keeps one row, and so one table, per request; so do steps in two parts.
        tables = () if self.spans is not None or in_parts else block_tables
        rows = self.captured(batch, tables) if is_full else self.listed(batch, tables)
        num_rows, num_tokens = len(rows.seq_lens), batch.num_tokens
        assert num_rows <= self.most_rows, (
            f"{num_rows} attention rows in a step of {num_tokens} tokens and {batch.num_reqs} "
            f"requests; backends have room for {self.most_rows}."
        )
        if self.spans is not None:
            segments, limit = (rows.query_start_loc, rows.seq_lens), self.states.max_model_len
            rest = (block_tables, slot_mappings, attn_groups, kv_cache_config)
            return self.spans.build(batch, is_full, segments, limit, *rest)
        if self.parts is not None and in_parts:
            rest = (block_tables, slot_mappings, attn_groups, kv_cache_config)
            limit = self.states.max_model_len
            return self.parts.build(batch, rows.query_start_loc, limit, *rest)
        return build_attn_metadata(
            attn_groups=attn_groups,
            num_reqs=num_rows,
            num_tokens=batch.num_tokens_after_padding if is_full else num_tokens,
            query_start_loc_gpu=rows.query_start_loc,
            query_start_loc_cpu=rows.starts_cpu,
            max_query_len=rows.longest,
            seq_lens=rows.seq_lens,
            max_seq_len=self.states.max_model_len,
            block_tables=rows.tables,
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            for_cudagraph_capture=for_capture,
            positions=batch.positions,
            causal=False,
        )

    def listed(self, batch: InputBatch, block_tables: tuple[Tensor, ...]) -> RowTensors:
        """Rows of any batch, listed on the host and copied to the device."""
        rows = batch_rows(batch, self.states)
        num_rows = len(rows.length_B)
        packed = np.zeros((3, num_rows + 1), dtype=np.int32)
        packed[0, 1:] = np.cumsum(rows.length_B)
        packed[1, :-1], packed[2, :-1] = rows.request_B, rows.behind_B
        device_rows = async_tensor_h2d(packed, device=self.states.device)
        request_B = device_rows[1, :num_rows].to(torch.int64)
        return RowTensors(
            device_rows[0],
            torch.from_numpy(packed[0]),
            (batch.seq_lens[request_B] - device_rows[2, :num_rows]).clamp_min(0),
            [table.index_select(0, request_B) for table in block_tables],
            int(rows.length_B.max()),
        )

    def captured(self, batch: InputBatch, block_tables: tuple[Tensor, ...]) -> RowTensors:
        """All rows of canvases, empty ones too, where graphs read them; then empty ones.

        All canvases are whole, or all are cut to one block of the configured length, which may be
        several of a request's own, or a part of one. The number of rows depends on the number of
        requests alone. Where they begin changes when requests come or go; each step only computes
        how many keys they see.
        """
        canvases, padded = batch.num_reqs, batch.num_reqs_after_padding
        fed, rest = divmod(batch.num_tokens, canvases)
        assert not rest and fed in self.captured_lengths, (
            f"{batch.num_tokens} tokens of {canvases} requests are neither canvases nor blocks."
        )
        lengths = self.states.block_length.np[batch.idx_mapping_np[:canvases]]
        layout = (fed, padded, lengths.tobytes(), tuple(batch.req_ids))
        if layout != self.layout:
            self._lay_out(fed, lengths, padded)
            self.layout = layout
        num_rows = padded * self.rows_per_request
        keys_RS = self.seq_lens[: self.behind_RS.numel()].view_as(self.behind_RS)
        torch.sub(batch.seq_lens[:canvases, None], self.behind_RS, out=keys_RS)
        return RowTensors(
            self.query_start_loc[: num_rows + 1],
            self.starts_cpu,
            self.seq_lens[:num_rows],
            self._persistent(block_tables, padded) if block_tables else [],
            # A graph replays any block length, and kernels are chosen by the longest. Two at least,
            # as FlashAttention 2 takes one to mean that every row has one query.
            max(fed, 2),
        )

    def _lay_out(self, fed: int, lengths: np.ndarray, padded: int) -> None:
        stops = canvas_segments(np.full(len(lengths), fed), lengths, self.rows_per_request - 1)
        starts = np.full(padded * self.rows_per_request + 1, fed * len(lengths), dtype=np.int32)
        starts[0] = 0
        starts[1 : stops.size + 1] = (stops + fed * np.arange(len(lengths))[:, None]).ravel()
        self.starts_cpu = torch.from_numpy(starts)
        async_tensor_h2d(starts, out=self.query_start_loc[: len(starts)])
        if self.parts is not None:
            self.parts.lay_out(stops)
        behind = (fed - stops).astype(np.int32)
        self.behind_RS = async_tensor_h2d(behind, device=self.states.device)
        self.seq_lens[stops.size : len(starts) - 1] = 0

    def _persistent(self, tables: tuple[Tensor, ...], padded: int) -> list[Tensor]:
        if [table.shape[1] for table in tables] != [buf.shape[1] for buf in self.block_tables]:
            # The first time, and if the context was lowered behind vLLM's profile of graph memory.
            rows = self.seq_lens.shape[0]
            self.block_tables = [table.new_zeros(rows, table.shape[1]) for table in tables]
        filled = []
        for buffer, table in zip(self.block_tables, tables, strict=True):
            filled.append(buffer[: padded * self.rows_per_request])
            rows_of = filled[-1].view(padded, self.rows_per_request, -1)
            rows_of.copy_(table[:padded, None].expand_as(rows_of))
        return filled
