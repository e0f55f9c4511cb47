"""Decide from this rank's columns of the logits: tensor parallelism with `vocab_parallel`.

The option is the default of several ranks. vLLM gathers whole rows on every rank; here a rank keeps
the columns that its share of the LM head computes. The kernel that reads the logits cuts each row
into partials anyway: each rank makes those of its own columns, one gather brings every rank the
partials of all, and all ranks merge them in the same order, so that they decide alike. Carry rows
and guidance stay within a rank's columns, too; whole rows are gathered only if float32 copies
are made. vLLM's own ``skip_gather`` makes this possible. Nobody but our sampler reads logits then,
so grammars and ``prompt_logprobs`` are refused.

Every rank makes the same calls in the same order, since all of them know the same requests.
Shape letters as in :mod:`dllm_plugin.kernels.confidence.kernel`.
"""

import torch
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)

from dllm_plugin.kernels.confidence.reference import Columns


class VocabShard:
    """Gather over ranks that hold columns ``[rank * width, (rank + 1) * width)`` each.

    The last of these columns may be padding.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        self.width = width
        first = get_tensor_model_parallel_rank() * width
        self.columns = Columns(
            first, vocab_size, get_tensor_model_parallel_world_size()
        )

    def gather_partials(self, partials_KTP: Tensor) -> Tensor:
        """Return the partials of all ranks, in the order of their columns.

        float64 ``[K, T, P] -> [S, K, T, P]``.
        """
        if not partials_KTP.numel():
            return partials_KTP[None]  # vLLM's gather on CPUs dies on an empty tensor
        # Its bits as float32, which is what that gather copies; copying is all it does.
        gathered = tensor_model_parallel_all_gather(
            partials_KTP.view(torch.float32), dim=0
        )
        return gathered.view(torch.float64).unflatten(
            0, (self.columns.shards, len(partials_KTP))
        )

    def gather_rows(self, logits_TV: Tensor) -> Tensor:
        """Return whole rows, ``[T, width] -> [T, V]``."""
        if not len(logits_TV):
            return logits_TV.new_empty(0, self.columns.vocab_size)
        return tensor_model_parallel_all_gather(logits_TV)[:, : self.columns.vocab_size]
