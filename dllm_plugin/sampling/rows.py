"""Describe logits rows: which request and canvas position each of them serves.

Two siblings find them: :mod:`dllm_plugin.sampling.canvas_rows` under block-causal attention and
:mod:`dllm_plugin.sampling.masked_rows` under full attention. Their `choose` runs before the forward
and may change which hidden states become logits; their `read` runs after it. Shape letters as in
:mod:`dllm_plugin.decoding.plan`; X rows of a logits tensor.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.config.memory import CHUNK_ROWS, rows_at_once


class RowChunk(NamedTuple):
    """Describe some logits rows of a step.

    rows_T    int64, index among all rows of the step
    logits_XV dtype of the model
    source_T  int, row of `logits_XV` of each row; None if they are the same ones, in order
    slot_T    int, slot of each row's request
    offset_T  int; start of the slot's canvas + offset + `shift` is the position that a row predicts
    allowed_TW int32, bits of the ids that a grammar allows; None without a grammar
    owner_np  int64, on the host: place of each row's request among the step's; None if all
              requests of the step ask for the same
    token_T   int64, tokens that were chosen before; None if the rows choose
    """

    rows_T: Tensor
    logits_XV: Tensor
    source_T: Tensor | None
    slot_T: Tensor
    offset_T: Tensor
    shift: int
    allowed_TW: Tensor | None = None
    owner_np: np.ndarray | None = None
    token_T: Tensor | None = None


def scatter_rows(
    values: Sequence[Tensor], rows: Sequence[Tensor], num_rows: int
) -> Tensor:
    """Scatter values of each chunk to ``[num_rows, ...]``; rows of no chunk are zero."""
    values_T, index_T = torch.cat(list(values)), torch.cat(list(rows))
    return values_T.new_zeros(num_rows, *values_T.shape[1:]).index_copy_(
        0, index_T, values_T
    )


def split_rows(chunk: RowChunk) -> Iterator[RowChunk]:
    """Cut a chunk into chunks of at most CHUNK_ROWS rows; no rows make one empty chunk."""
    rows_T, logits_XV, source_T, slot_T, offset_T, shift, allowed_TW, _, token_T = chunk
    most = rows_at_once(CHUNK_ROWS, logits_XV.shape[1])
    for low in range(0, max(len(rows_T), 1), most):
        cut = slice(low, low + most)
        if source_T is None:
            logits, source = logits_XV[cut], None
        else:
            logits, source = logits_XV, source_T[cut]
        allowed = None if allowed_TW is None else allowed_TW[cut]
        token = None if token_T is None else token_T[cut]
        places = slot_T[cut], offset_T[cut]
        yield RowChunk(
            rows_T[cut], logits, source, *places, shift, allowed, token_T=token
        )


def take_rows(chunk: RowChunk, wanted_np: np.ndarray) -> RowChunk:
    """Return the rows of the wanted requests, bool per request of the step."""
    assert chunk.owner_np is not None, (
        "a step of requests that differ knows whose its rows are"
    )
    index_np = np.flatnonzero(wanted_np[chunk.owner_np])
    index = async_tensor_h2d(index_np, device=chunk.rows_T.device)
    rows_T, logits_XV, source_T, slot_T, offset_T, shift, allowed_TW, _, token_T = chunk
    source = index if source_T is None else source_T[index]
    allowed = None if allowed_TW is None else allowed_TW[index]
    token = None if token_T is None else token_T[index]
    places = slot_T[index], offset_T[index]
    return RowChunk(
        rows_T[index], logits_XV, source, *places, shift, allowed, token_T=token
    )
