"""This rank's columns of the logits: tensor parallelism with the option `vocab_parallel`.

vLLM gathers whole rows on every rank. Here a rank keeps the columns that its share of the LM head
computes, and the ranks exchange a few numbers per row, or the rows of a step that needs whole ones.
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
    """Columns ``[rank * width, (rank + 1) * width)``, the last of which may be padding."""

    def __init__(self, width: int, vocab_size: int) -> None:
        self.width = width
        first = get_tensor_model_parallel_rank() * width
        self.columns = Columns(first, vocab_size, get_tensor_model_parallel_world_size())

    def exchange(self, parts_KTP: Tensor) -> Tensor:
        """The parts of all ranks, in the order of their columns.

        float64 ``[K, T, P] -> [S, K, T, P]``.
        """
        if not parts_KTP.numel():
            return parts_KTP[None]  # vLLM's gather on CPUs dies on an empty tensor
        # Its bits as float32, which is what that gather copies; copying is all it does.
        gathered = tensor_model_parallel_all_gather(parts_KTP.view(torch.float32), dim=0)
        return gathered.view(torch.float64).unflatten(0, (self.columns.shards, len(parts_KTP)))

    def whole(self, logits_TV: Tensor) -> Tensor:
        """Whole rows, ``[T, width] -> [T, V]``."""
        if not len(logits_TV):
            return logits_TV.new_empty(0, self.columns.vocab_size)
        return tensor_model_parallel_all_gather(logits_TV)[:, : self.columns.vocab_size]
