"""Turn query segments into sequences, and sequences into vLLM's attention metadata.

Every query segment becomes one sequence of ordinary variable-length attention without a causal
mask: its own ``query_start_loc``, ``seq_lens`` = the keys it sees, and its request's row of the
block table. Two kinds of steps deviate from that. Some steps use cascade attention, which
reads each context once for all sequences of a canvas (:mod:`dllm_plugin.attention.cascade`). And
under the `distinct` KV layout a request stays one sequence, while the segments define what each of
its tokens sees (:mod:`dllm_plugin.attention.distinct`).

Learned from experience:

- While vLLM captures a CUDA graph, it gives the mode NONE; only `for_capture` shows it. What is
  handed out then has to lie in persistent buffers, as it does for the mode FULL. A graph that
  captured temporary tensors replays whatever is in their memory later
  (benchmarks/reports/attention.md: what looked like a fault of FlashAttention 3 was this).
- A full CUDA graph has one query length for all requests: the canvas, one block if many
  requests compute a single block each (`commit_alone_from`, and full attention between its
  refreshes), a refresh that begins near its block, or a width of floating canvases. The number of
  sequences per request is the same for all. Only this module knows the difference
  (:meth:`AttentionSequences.captured`); the rest of a step reads the number of computed positions
  from the batch, as in eager steps.

Shape letters: R requests, B sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm_plugin.config.cuda_graphs import captured_lengths
from dllm_plugin.decoding.plan import canvas_segments
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases

from .cascade import CascadeBuffers
from .distinct import SpanBuffers
from .floating import captured_floating, floating_sequences
from .kv_groups import KVGroups
from .prefills import (
    Sequences,
    SequenceTensors,
    causal_metadata,
    joined,
    max_sequences,
    of_segments,
    prefills,
    sequences_per_canvas,
    upload,
    without_empty,
)


def batch_sequences(batch: InputBatch, states: CanvasStates) -> Sequences:
    """List the sequences of a batch, none of them empty, in the runner's order of requests.

    That is canvases first, then prefills.
    """
    spans = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])
    slots = batch.idx_mapping_np[: batch.num_reqs]
    lengths = states.requests.block_length.np[slots]
    blocks = states.full_NS.shape[1]
    if states.config.method.full_attention:
        # A request sees its whole canvas, computed now or before.
        num_reqs = batch.num_reqs
        canvases = count_canvases(batch)
        span_stops = batch.num_computed_tokens_np[:num_reqs].astype(np.int64) + spans
        stops = span_stops.copy()
        if canvases:
            drafts = batch.num_draft_tokens_per_req
            assert drafts is not None
            slots = batch.idx_mapping_np[:canvases]
            starts = span_stops[:canvases] - drafts[:canvases]
            stops[:canvases] = states.bounds_np(slots, starts).stop
        return Sequences(np.arange(num_reqs), spans, span_stops - stops)
    num_canvases = count_canvases(batch)
    parts = []
    if num_canvases:
        canvas = spans[:num_canvases]
        length = lengths[:num_canvases]
        stops = canvas_segments(canvas, length, blocks)
        zeros = np.zeros_like(canvas)
        parts.append(of_segments(0, stops, zeros, canvas))
    if num_canvases < batch.num_reqs:
        parts.append(prefills(batch, states, num_canvases))
    return without_empty(joined(parts))


class AttentionSequences:
    """Build attention metadata; own the buffers that captured CUDA graphs read."""

    def __init__(
        self,
        states: CanvasStates,
        max_num_reqs: int,
        max_num_tokens: int,
        cascade_from: Mapping[int, int] | None = None,
    ) -> None:
        """Allocate buffers.

        Args:
            cascade_from: from how many requests on steps use cascade attention, by the positions
                that each request computes; empty: none does.
        """
        config, device = states.config, states.device
        self.states = states
        self.device = device
        self.method = config.method
        self.spans: SpanBuffers | None = None
        if config.kv_cache_layout == "distinct":
            self.spans = SpanBuffers(max_num_reqs, max_num_tokens, device)
        self.sequences_per_request = sequences_per_canvas(config)
        self.max_sequences = max_sequences(config, max_num_reqs, max_num_tokens)
        # Under full attention the host knows where the text ends.
        self.ends_exactly = self.method.exact_end and not self.method.full_attention
        each = self.sequences_per_request
        captured = max_num_reqs * each
        self.seq_lens = torch.zeros(captured, dtype=torch.int32, device=device)
        self.query_start_loc = self.seq_lens.new_zeros(captured + 1)
        self.cascade: CascadeBuffers | None = None
        self.cascade_from = cascade_from or {}
        if cascade_from:
            self.cascade = CascadeBuffers(max_num_reqs, each, device)
        self.block_tables: list[Tensor] = []
        # 1 for sequences whose attention is causal, read by captured graphs.
        self.causal: Tensor | None = None
        # Which canvases of the last forward store their block, bool [R]; None: not found out.
        self.stores_R: Tensor | None = None
        if self.method.causal_commit:
            self.causal = torch.zeros_like(self.seq_lens)
        # How many positions captured steps compute for each request.
        self.captured_lengths = captured_lengths(config)
        # What the buffers are laid out for: positions per request, requests with padding, block
        # lengths, and names of the requests. The last are compared because vLLM's sleep mode may
        # take the buffers while no request is left.
        self.layout: tuple[int, int, bytes, tuple[str, ...]] = (0, 0, b"", ())
        self.query_start_loc_cpu = torch.zeros(1, dtype=torch.int32)
        # Full attention, within a layout.
        self._unseen_of: tuple[bytes, bytes] | None = None
        self.unseen_RS = self.seq_lens.new_zeros(0, each)

    def build(
        self,
        batch: InputBatch,
        groups: KVGroups,
        cudagraph_mode: CUDAGraphMode,
        for_capture: bool,
    ) -> dict[str, Any]:
        """Build the metadata of one step for vLLM's attention backends."""
        # Only `for_capture` announces capture; its mode argument is NONE.
        is_full = for_capture or cudagraph_mode == CUDAGraphMode.FULL
        if self.method.causal_rows:
            return causal_metadata(batch, groups, is_full, for_capture)
        length = self._uniform_length(batch, is_full)
        requests = batch.num_reqs_after_padding if is_full else batch.num_reqs
        least = self.cascade_from.get(length)
        use_cascade = least is not None and requests >= least
        # One row of the block table per request is enough for spans and for a cascade.
        tables = groups.block_tables
        if self.spans is not None or use_cascade:
            tables = ()
        list_sequences = self.captured if is_full else self.eager
        sequences = list_sequences(batch, tables)
        count = len(sequences.seq_lens)
        num_tokens = batch.num_tokens
        assert count <= self.max_sequences, (
            f"{count} attention sequences in a step of {num_tokens} tokens and {batch.num_reqs} "
            f"requests; the buffers of backends have room for {self.max_sequences}."
        )
        if self.spans is not None:
            segments = (sequences.query_start_loc, sequences.seq_lens)
            return self.spans.build(batch, is_full, segments, groups)
        if is_full:
            num_tokens = batch.num_tokens_after_padding
        if self.cascade is not None and use_cascade:
            if self.states.floating is not None:
                self.cascade.take_floating(batch, length, sequences.seq_lens)
            starts = sequences.query_start_loc
            return self.cascade.build(batch, length, starts, groups)
        return build_attn_metadata(
            num_reqs=count,
            num_tokens=num_tokens,
            query_start_loc_gpu=sequences.query_start_loc,
            query_start_loc_cpu=sequences.query_start_loc_cpu,
            max_query_len=sequences.max_query_len,
            seq_lens=sequences.seq_lens,
            for_cudagraph_capture=for_capture,
            causal=self._causal(batch, sequences, is_full),
            **groups._replace(block_tables=sequences.block_tables)._asdict(),
        )

    def _causal(
        self, batch: InputBatch, sequences: SequenceTensors, is_full: bool
    ) -> bool | Tensor:
        """Return which sequences attend causally, int32 ``[B]``; False: none can.

        Those of prompts do, and those of canvases whose block is stored by this step. With one
        query for each sequence, True is the same.
        """
        self.stores_R = None
        canvases = count_canvases(batch)
        if self.causal is None or sequences.max_query_len == 1:
            return self.causal is not None
        if not (canvases or is_full):
            return True
        requests = batch.num_reqs_after_padding if is_full else batch.num_reqs
        causal_R = torch.ones(requests, dtype=torch.int32, device=self.device)
        slots_R = batch.idx_mapping[:canvases]
        computed_R = batch.query_start_loc[: canvases + 1].diff()
        self.stores_R = self.states.stores_block(slots_R, computed_R)
        causal_R[:canvases] = self.stores_R.to(torch.int32)
        if not is_full:
            return causal_R[sequences.request_B]
        count = len(sequences.seq_lens)
        by_request = self.causal[:count].view(requests, -1)
        by_request.copy_(causal_R[:, None].expand_as(by_request))
        return self.causal[:count]

    def _uniform_length(self, batch: InputBatch, is_full: bool) -> int:
        """Return how many positions each canvas computes in a step that may have a cascade, else 0.

        Blocks have a cascade in full graphs, floating canvases in any step without prompts in
        which all of them have one width: if these are many, such steps are too large for graphs.
        """
        floats = self.states.floating is not None
        if not self.cascade_from or not (is_full or floats):
            return 0
        length, rest = divmod(batch.num_tokens, batch.num_reqs)
        if rest:
            return 0
        if is_full:
            return length
        spans = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])
        has_prompts = count_canvases(batch) < batch.num_reqs
        return 0 if has_prompts or (spans != length).any() else length

    def eager(
        self, batch: InputBatch, block_tables: Sequence[Tensor]
    ) -> SequenceTensors:
        """List the sequences of any batch on the host and copy them to the device."""
        if self.states.floating is not None:
            return floating_sequences(
                batch, self.states, block_tables, self.sequences_per_request
            )
        sequences = batch_sequences(batch, self.states)
        found = upload(batch, self.states, sequences, block_tables)
        if self.ends_exactly:
            slots_B = batch.idx_mapping[found.request_B]
            keys_B = torch.minimum(found.seq_lens, self._text_ends(slots_B))
            found = found._replace(seq_lens=keys_B)
        return found

    def captured(
        self, batch: InputBatch, block_tables: Sequence[Tensor]
    ) -> SequenceTensors:
        """Fill the buffers that graphs read: all sequences of canvases, then empty sequences.

        All requests compute their whole canvas, or all compute one block of the configured length,
        which may be several blocks of a request's own length, or a share of one; or all refresh.
        The number of sequences depends only on the number of requests; those without queries are
        kept. Where they begin changes when requests come or go; each step only computes how many
        keys they see.
        """
        if self.states.floating is not None:
            return self._captured_floating(batch, block_tables)
        canvases = batch.num_reqs
        padded = batch.num_reqs_after_padding
        length, rest = divmod(batch.num_tokens, canvases)
        assert not rest and length in self.captured_lengths, (
            f"{batch.num_tokens} tokens of {canvases} requests are neither canvases nor blocks."
        )
        slots = batch.idx_mapping_np[:canvases]
        block_lengths = self.states.requests.block_length.np[slots]
        names = tuple(batch.req_ids)
        layout = (length, padded, block_lengths.tobytes(), names)
        if layout != self.layout:
            self._lay_out(length, block_lengths, padded)
            self.layout = layout
        if self.method.full_attention:
            self._find_unseen(batch)
        count = padded * self.sequences_per_request
        keys_RS = self.seq_lens[: self.unseen_RS.numel()]
        keys_RS = keys_RS.view_as(self.unseen_RS)
        torch.sub(batch.seq_lens[:canvases, None], self.unseen_RS, out=keys_RS)
        if self.ends_exactly:
            ends_R = self._text_ends(batch.idx_mapping[:canvases])
            torch.minimum(keys_RS, ends_R[:, None], out=keys_RS)
        return SequenceTensors(
            self.query_start_loc[: count + 1],
            self.query_start_loc_cpu,
            self.seq_lens[:count],
            self._persistent(block_tables, padded) if block_tables else [],
            # Two at least: FlashAttention 2 takes one to mean that every sequence has one query.
            length if self.causal is not None else max(length, 2),
        )

    def _text_ends(self, slots: Tensor) -> Tensor:
        """Return how many keys the texts of slots have, int32; the context if none is known."""
        ends = self.states.requests.blocks_end.gpu[slots]
        return ends.masked_fill(ends == 0, self.states.max_model_len).to(torch.int32)

    def forget(self) -> None:
        """Drop what is cached of a block: a request may have reused another's name."""
        self._unseen_of = None

    def _find_unseen(self, batch: InputBatch) -> None:
        """Upload how many keys lie after each forward; reused within a block."""
        drafts = batch.num_draft_tokens_per_req
        drafted = b"" if drafts is None else drafts.tobytes()
        of = (batch.num_computed_tokens_np.tobytes(), drafted)
        if of != self._unseen_of:
            self._unseen_of = of
            unseen = batch_sequences(batch, self.states).unseen_B
            unseen = unseen.astype(np.int32)[:, None]
            on_device = async_tensor_h2d(unseen, device=self.device)
            self.unseen_RS = on_device

    def _captured_floating(
        self, batch: InputBatch, block_tables: Sequence[Tensor]
    ) -> SequenceTensors:
        """Fill those buffers for floating canvases, whose sequences only the device knows."""
        padded = batch.num_reqs_after_padding
        count = padded * self.sequences_per_request
        starts = self.query_start_loc[: count + 1]
        keys = self.seq_lens[:count]
        on_host = captured_floating(batch, self.states, starts, keys)
        tables = self._persistent(block_tables, padded) if block_tables else []
        return SequenceTensors(
            starts, on_host, keys, tables, max(batch.num_tokens // batch.num_reqs, 2)
        )

    def _lay_out(self, length: int, block_lengths: np.ndarray, padded: int) -> None:
        """Write where sequences begin, for requests that compute `length` positions each."""
        num_reqs = len(block_lengths)
        slots = self.sequences_per_request
        whole = np.full(num_reqs, length)
        if self.method.full_attention:
            stops = whole[:, None]
        else:
            stops = canvas_segments(whole, block_lengths, slots - 1)
        starts = np.full(padded * slots + 1, length * num_reqs, dtype=np.int32)
        starts[0] = 0
        offsets = length * np.arange(num_reqs)[:, None]
        starts[1 : stops.size + 1] = (stops + offsets).ravel()
        self.query_start_loc_cpu = torch.from_numpy(starts)
        async_tensor_h2d(starts, out=self.query_start_loc[: len(starts)])
        if self.cascade is not None:
            self.cascade.lay_out(stops)
        unseen = (length - stops).astype(np.int32)
        self._unseen_of = None
        self.unseen_RS = async_tensor_h2d(unseen, device=self.device)
        self.seq_lens[stops.size : len(starts) - 1] = 0

    def _persistent(self, tables: Sequence[Tensor], padded: int) -> list[Tensor]:
        """Copy each request's row of the block tables to the rows of all its sequences."""
        widths = [table.shape[1] for table in tables]
        if widths != [buffer.shape[1] for buffer in self.block_tables]:
            # The first time, and if the context was lowered after vLLM's profile of graph memory.
            self.block_tables = []
            for table in tables:
                made = table.new_zeros(len(self.seq_lens), table.shape[1])
                self.block_tables.append(made)
        filled = []
        for buffer, table in zip(self.block_tables, tables, strict=True):
            filled.append(buffer[: padded * self.sequences_per_request])
            rows_of = filled[-1].view(padded, self.sequences_per_request, -1)
            rows_of.copy_(table[:padded, None].expand_as(rows_of))
        return filled
