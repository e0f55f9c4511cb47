"""List the attention sequences of floating canvases, known only to the device.

A canvas has a sequence for its run, one for each part of its window and one for its rest, some of
them empty: how many positions a step computes is known on the host, where the run ends is not.
Shapes as in :mod:`dllm_plugin.attention.sequences`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm_plugin.kernels.floating import lay_out, lay_out_reference
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases

from .prefills import (
    Sequences,
    SequenceTensors,
    joined,
    prefills,
    upload,
    without_empty,
)


def floating_sequences(
    batch: InputBatch,
    states: CanvasStates,
    block_tables: Sequence[Tensor],
    per_canvas: int,
) -> SequenceTensors:
    """List the sequences of any batch: canvases first, then prefills without empty sequences."""
    canvases = count_canvases(batch)
    spans = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])
    request = np.repeat(np.arange(canvases), per_canvas)
    lengths = _undecided(spans[:canvases], per_canvas)
    parts = [Sequences(request, lengths, np.zeros_like(request))]
    if canvases < batch.num_reqs:
        parts.append(without_empty(prefills(batch, states, canvases)))
    found = upload(batch, states, joined(parts), block_tables)
    starts = found.query_start_loc
    count = canvases * per_canvas
    if canvases:
        _lay_out(batch, states, canvases, starts[: count + 1], found.seq_lens[:count])
    on_host = found.query_start_loc_cpu
    if states.device.type == "cpu":
        on_host = starts
    longest = int(spans.max())
    return found._replace(query_start_loc_cpu=on_host, max_query_len=longest)


def captured_floating(
    batch: InputBatch, states: CanvasStates, query_start_loc: Tensor, seq_lens: Tensor
) -> Tensor:
    """Write the sequences of a captured step to the buffers that its graph reads, all of them.

    Every request computes as many positions; those of the padding compute and see nothing. Returns
    where sequences begin on the host, as if nothing were decided.
    """
    canvases = batch.num_reqs
    num_tokens = batch.num_tokens
    width, rest = divmod(num_tokens, canvases)
    assert not rest, f"{num_tokens} tokens of {canvases} requests are no uniform step."
    per_canvas = len(seq_lens) // batch.num_reqs_after_padding
    count = canvases * per_canvas
    if count < len(seq_lens):
        query_start_loc[count + 1 :].fill_(num_tokens)
        seq_lens[count:].zero_()
    _lay_out(batch, states, canvases, query_start_loc[: count + 1], seq_lens[:count])
    if states.device.type == "cpu":
        return query_start_loc
    starts = np.full(len(query_start_loc), num_tokens, dtype=np.int32)
    starts[0] = 0
    lengths = _undecided(np.full(canvases, width), per_canvas)
    starts[1 : count + 1] = np.cumsum(lengths)
    return torch.from_numpy(starts)


def _undecided(spans: np.ndarray, per_canvas: int) -> np.ndarray:
    """Return lengths of sequences as if nothing were decided; backends read bounds from them."""
    lengths = np.zeros((len(spans), per_canvas), dtype=np.int64)
    lengths[:, 1] = spans
    return lengths.ravel()


def _lay_out(
    batch: InputBatch,
    states: CanvasStates,
    canvases: int,
    starts_B: Tensor,
    keys_B: Tensor,
) -> None:
    """Compute on the device where sequences of canvases begin and how many keys each sees."""
    assert states.floating is not None
    on_gpu = states.device.type == "cuda"
    write = lay_out if on_gpu else lay_out_reference
    write(
        states.canvas_NC,
        batch.idx_mapping[:canvases].to(torch.int64),
        states.floating.texts,
        batch.query_start_loc[: canvases + 1],
        batch.seq_lens[:canvases],
        states.floating.rules(states.max_model_len),
        starts_B,
        keys_B,
    )
