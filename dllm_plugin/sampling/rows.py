"""Describe logits rows: which request and canvas position each of them serves.

Two siblings find them: :mod:`dllm_plugin.sampling.canvas_rows` under block-causal attention and
:mod:`dllm_plugin.sampling.masked_rows` under full attention. Their `choose` runs before the forward
and may change which hidden states become logits; their `read` runs after it. Shape letters as in
:mod:`dllm_plugin.decoding.plan`; X rows of a logits tensor.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.kernels.confidence.reference import Columns


class RowChunk(NamedTuple):
    """Describe some logits rows of a step.

    rows_T    int64, index among all rows of the step
    logits_XV dtype of the model
    slot_T    int, slot of each row's request
    offset_T  int; start of the slot's canvas + offset + `shift` is the position that a row predicts
    source_T  int, row of `logits_XV` of each row; None if they are the same rows, in order
    allowed_TW int32, bits of the ids that a grammar allows; None without a grammar
    owner_np  int64, on the host: place of each row's request among the step's; None if all
              requests of the step ask for the same
    token_T   int64, tokens that were chosen before; None if the rows choose
    """

    rows_T: Tensor
    logits_XV: Tensor
    slot_T: Tensor
    offset_T: Tensor
    source_T: Tensor | None = None
    shift: int = 0
    allowed_TW: Tensor | None = None
    owner_np: np.ndarray | None = None
    token_T: Tensor | None = None


def scatter_rows(
    values: Sequence[Tensor], rows: Sequence[Tensor], num_rows: int
) -> Tensor:
    """Scatter values of each chunk to ``[num_rows, ...]``; rows of no chunk are zero."""
    values_T = torch.cat(list(values))
    index_T = torch.cat(list(rows))
    scattered = values_T.new_zeros(num_rows, *values_T.shape[1:])
    return scattered.index_copy_(0, index_T, values_T)


def split_rows(chunk: RowChunk, most: int) -> Iterator[RowChunk]:
    """Cut a chunk into chunks of at most `most` rows; no rows make one empty chunk."""
    for low in range(0, max(len(chunk.rows_T), 1), most):
        cut = slice(low, low + most)
        if chunk.source_T is None:
            yield _only(chunk, cut, chunk.logits_XV[cut], None)
        else:
            yield _only(chunk, cut, chunk.logits_XV, chunk.source_T[cut])


def take_rows(chunk: RowChunk, index: Tensor) -> RowChunk:
    """Return some rows of a chunk, int64."""
    source_T = index if chunk.source_T is None else chunk.source_T[index]
    return _only(chunk, index, chunk.logits_XV, source_T)


def _only(
    chunk: RowChunk, which: Any, logits_XV: Tensor, source_T: Tensor | None
) -> RowChunk:
    """Return some rows of a chunk, which now lie elsewhere, without their owners."""
    allowed_TW, token_T = chunk.allowed_TW, chunk.token_T
    return chunk._replace(
        rows_T=chunk.rows_T[which],
        logits_XV=logits_XV,
        slot_T=chunk.slot_T[which],
        offset_T=chunk.offset_T[which],
        source_T=source_T,
        allowed_TW=None if allowed_TW is None else allowed_TW[which],
        owner_np=None,
        token_T=None if token_T is None else token_T[which],
    )


def rows_of(chunk: RowChunk, wanted_np: np.ndarray) -> RowChunk:
    """Return the rows of the wanted requests, bool per request of the step."""
    assert chunk.owner_np is not None, (
        "a step of requests that differ knows whose its rows are"
    )
    index_np = np.flatnonzero(wanted_np[chunk.owner_np])
    index = async_tensor_h2d(index_np, device=chunk.rows_T.device)
    return take_rows(chunk, index)


class VocabShard:
    """Decide from this rank's columns of the logits: tensor parallelism with `vocab_parallel`.

    Each rank has columns ``[rank * width, (rank + 1) * width)``; the last of them may be padding.
    The option is the default of several ranks. vLLM gathers whole rows on every rank; here a rank
    keeps the columns that its share of the LM head computes. The kernel that reads the logits cuts
    each row into partials anyway: each rank makes those of its own columns, one gather brings every
    rank the partials of all, and all ranks merge them in the same order, so that they decide alike.
    Carry rows and guidance stay within a rank's columns, too; whole rows are gathered only if
    float32 copies are made. vLLM's own ``skip_gather`` makes this possible. Nobody but our sampler
    reads logits then, so grammars and ``prompt_logprobs`` are refused.

    Every rank makes the same calls in the same order, since all of them know the same requests.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        self.width = width
        first = get_tensor_model_parallel_rank() * width
        self.columns = Columns(
            first, vocab_size, get_tensor_model_parallel_world_size()
        )

    def gather_partials(self, partials_KTP: Tensor) -> Tensor:
        """Return the partials of all ranks, in the order of their columns.

        float64 ``[K, T, P] -> [S, K, T, P]``: K numbers of each of T rows in P partials, S ranks.
        """
        if not partials_KTP.numel():
            # vLLM's gather on CPUs dies on an empty tensor.
            return partials_KTP[None]
        # Its bits as float32, which is what that gather copies; copying is all it does.
        bits = partials_KTP.view(torch.float32)
        gathered = tensor_model_parallel_all_gather(bits, dim=0)
        shape = (self.columns.shards, len(partials_KTP))
        return gathered.view(torch.float64).unflatten(0, shape)

    def gather_rows(self, logits_TV: Tensor) -> Tensor:
        """Return whole rows, ``[T, width] -> [T, V]``."""
        if not len(logits_TV):
            return logits_TV.new_empty(0, self.columns.vocab_size)
        whole_TV = tensor_model_parallel_all_gather(logits_TV)
        return whole_TV[:, : self.columns.vocab_size]
