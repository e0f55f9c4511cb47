"""List attention sequences of prompts and resumed texts on the host, and copy them to the device.

Shape letters: B sequences.

`max_sequences` bounds the buffers with one entry per sequence.

A sequence is a run of queries with keys of its own, as variable-length attention takes it. Each
query segment is a sequence, so a step can have more sequences than requests.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.decoding.plan import prefill_segments
from dllm_plugin.state.canvas_states import CanvasStates

from .kv_groups import KVGroups


class SequenceTensors(NamedTuple):
    """List the sequences of a step as backends take them.

    query_start_loc int32 ``[B + 1]``, query_start_loc_cpu the same on the host; seq_lens int32
    ``[B]``; block_tables int32 ``[B, pages]``, one for each KV cache group; max_query_len, an upper
    bound on the queries of a sequence; request_B int64, index in the batch, of eager steps.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    block_tables: list[Tensor]
    max_query_len: int
    request_B: Tensor | None = None


class Sequences(NamedTuple):
    """List the sequences of a step on the host.

    request_B int64, index in the batch; length_B int64, queries of the sequence; unseen_B int64,
    how many positions at the end of its request's span the sequence does not see. That is negative
    if it sees keys after the span, which earlier steps computed.
    """

    request_B: np.ndarray
    length_B: np.ndarray
    unseen_B: np.ndarray


def joined(parts: list[Sequences]) -> Sequences:
    """Return the sequences of several lists, in order."""
    return Sequences(*map(np.concatenate, zip(*parts, strict=True)))


def without_empty(sequences: Sequences) -> Sequences:
    """Return the sequences that have queries."""
    filled = sequences.length_B > 0
    return Sequences(*(field[filled] for field in sequences))


def upload(
    batch: InputBatch,
    states: CanvasStates,
    sequences: Sequences,
    block_tables: Sequence[Tensor],
) -> SequenceTensors:
    """Copy sequences to the device, and compute there how many keys each sees."""
    count = len(sequences.length_B)
    packed = np.zeros((3, count + 1), dtype=np.int32)
    packed[0, 1:] = np.cumsum(sequences.length_B)
    packed[1, :-1] = sequences.request_B
    packed[2, :-1] = sequences.unseen_B
    on_device = async_tensor_h2d(packed, device=states.device)
    request_B = on_device[1, :count].to(torch.int64)
    # An idle data-parallel rank computes one dummy request longer than a block table's row.
    keys_B = batch.seq_lens[request_B] - on_device[2, :count]
    return SequenceTensors(
        on_device[0],
        torch.from_numpy(packed[0]),
        keys_B.clamp(0, states.max_model_len),
        [table.index_select(0, request_B) for table in block_tables],
        int(sequences.length_B.max()),
        request_B,
    )


def of_segments(
    first_request: int, stops: np.ndarray, starts: np.ndarray, spans: np.ndarray
) -> Sequences:
    """Return the sequences of requests whose segments end at `stops`."""
    lengths = np.diff(stops, axis=1, prepend=starts[:, None])
    request = np.repeat(
        np.arange(first_request, first_request + len(stops)), stops.shape[1]
    )
    unseen = (starts + spans)[:, None] - stops
    return Sequences(request, lengths.ravel(), unseen.ravel())


def prefills(batch: InputBatch, states: CanvasStates, first: int) -> Sequences:
    """Return the sequences of a batch's requests from `first` on, which bring no canvas."""
    rest = slice(first, batch.num_reqs)
    slots = batch.idx_mapping_np[rest]
    spans = np.diff(batch.query_start_loc_np[first : batch.num_reqs + 1])
    starts = batch.num_computed_tokens_np[rest].astype(np.int64)
    ends = starts + spans
    origin = states.requests.origin.np[slots]
    is_prefill = batch.is_prefilling_np[rest]
    # Warm-up steps also run requests that are neither prefills nor canvases: one segment. So are
    # prompts whose attention is causal.
    if states.config.method.causal_commit:
        is_prefill = np.zeros_like(is_prefill)
    origin = np.where(is_prefill, origin, ends)
    lengths = states.requests.block_length.np[slots]
    stops = prefill_segments(origin, ends, lengths)
    if states.floating is not None:
        stops = states.floating.prefill_stops(slots, is_prefill, ends, stops)
    stops = np.maximum(stops, starts[:, None])
    return of_segments(first, stops, starts, spans)


def sequences_per_canvas(config: DecodeConfig) -> int:
    """Return how many sequences a canvas has in a CUDA graph.

    There is one per block slot, and one for the positions after the last block slot. Under full
    attention all positions see the same keys; a method with slots has one block.
    """
    if config.method.full_attention or config.method.slots is not None:
        return 1
    return config.block_slots + 1


def max_sequences(config: DecodeConfig, max_num_reqs: int, max_num_tokens: int) -> int:
    """Return an upper bound on the sequences of any step.

    A captured graph has every sequence of a canvas, empty or not, for each request of the padded
    batch. In all other steps each sequence has a query of its own
    (:func:`dllm_plugin.attention.sequences.batch_sequences` leaves empty ones out), so there are at
    most as many sequences as tokens: a prompt or a resumed text of n blocks is n sequences, and
    blocks may be one token long. If canvases float, only the device knows which are empty.
    """
    if config.method.floats:
        return max_num_reqs * sequences_per_canvas(config) + max_num_tokens
    return max(max_num_reqs * sequences_per_canvas(config), max_num_tokens)


def causal_metadata(
    batch: InputBatch, groups: KVGroups, is_full: bool, for_capture: bool
) -> dict[str, Any]:
    """Return the metadata of a step in which each request is one causal sequence.

    A full graph reads the runner's own buffers, which stay where they are.
    """
    count = batch.num_reqs_after_padding if is_full else batch.num_reqs
    num_tokens = batch.num_tokens_after_padding if is_full else batch.num_tokens
    starts_np = batch.query_start_loc_np[: count + 1]
    return build_attn_metadata(
        num_reqs=count,
        num_tokens=num_tokens,
        query_start_loc_gpu=batch.query_start_loc[: count + 1],
        query_start_loc_cpu=torch.from_numpy(starts_np),
        max_query_len=int(np.diff(starts_np).max()),
        seq_lens=batch.seq_lens[:count],
        for_cudagraph_capture=for_capture,
        causal=True,
        **groups._asdict(),
    )
