"""Plan cascade attention of canvases: the context is the prefix, the canvas the suffix.

Without a cascade, every block of a canvas is a sequence that reads the whole context, as are run
and window of a canvas that floats. If every query head has keys of its own, several blocks are
open and enough requests run, these reads take most of the time (benchmarks/reports/attention.md).
With a cascade, one call of FlashAttention 3 attends from the whole canvas to the context, one
sequence per request. A second call attends from each block to the keys that this forward computed,
one sequence per block. Both results are merged by their log-sum-exp
(:mod:`dllm_plugin.attention.flash`).

R requests, B sequences, T tokens, C canvas positions.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import is_quantized_kv_cache
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm_plugin.config.decode import get_decode_config

from .backends import FLASH_ATTN
from .kv_groups import ExtraArguments, KVGroups

# Four query heads per KV head lose everywhere up to contexts of 4,096: GEMMs bound them.
MAX_HEADS_PER_KV_HEAD = 1
# Measured at contexts of 1,024 tokens. A second launch costs as much as reading this many numbers
# per context position once more.
LAUNCH_COST = 21_845
# Merging the results of this many canvas positions costs as much as reading the context once more.
POSITIONS_PER_READ = 80


class CanvasSuffix(NamedTuple):
    """Describe the sequences of the suffix, for the backend's metadata builder.

    start_loc int32 ``[B + 1]``, first query of each block; keys int32 ``[B]``, how many positions
    of its canvas a block sees; request int32 ``[B, 1]``; length, positions that each canvas
    computes.
    """

    start_loc: Tensor
    keys: Tensor
    request: Tensor
    length: int


def cascade_from(vllm_config: VllmConfig, flash_version: int | None) -> dict[int, int]:
    """Return from how many requests on steps are faster with a cascade, by positions of each.

    Of blocks those that compute whole canvases in full graphs, of floating canvases those in which
    each computes as many positions. Empty: none is.

    It needs FlashAttention 3 and unquantised keys, and is left out if results may not depend on
    how many requests run (VLLM_BATCH_INVARIANT). It is left out too if blocks commit in forwards
    of their own: such a step may see canvas keys that earlier steps computed, and the suffix has
    only those of this forward. And if the last block ends with the text: the suffix counts whole
    blocks.
    """
    backend = vllm_config.attention_config.backend
    chosen = backend == FLASH_ATTN and flash_version == 3
    quantised = is_quantized_kv_cache(vllm_config.cache_config.cache_dtype)
    if not chosen or quantised or envs.VLLM_BATCH_INVARIANT:
        return {}
    model = vllm_config.model_config
    config = get_decode_config(vllm_config)
    parallel = vllm_config.parallel_config
    heads = model.get_num_attention_heads(parallel)
    kv_heads = model.get_num_kv_heads(parallel)
    unsupported = config.dedicated_commit or config.method.full_attention
    unsupported |= config.method.exact_end or config.method.causal_commit
    unsupported |= model.get_sliding_window() is not None
    unsupported |= config.kv_cache_layout == "distinct"
    if unsupported or heads > MAX_HEADS_PER_KV_HEAD * kv_heads:
        return {}
    blocks = {config.canvas_length: config.canvas_length // config.block_length}
    if config.method.floats:
        # Run and window; a window of several parts only saves more.
        blocks = dict.fromkeys(range(2, config.canvas_length + 1), 2)
    numbers = kv_heads * model.get_head_size()
    most = vllm_config.scheduler_config.max_num_seqs
    found = {}
    for length, sequences in blocks.items():
        reads_saved = sequences - 1 - length / POSITIONS_PER_READ
        if reads_saved <= 0:
            continue
        requests = math.ceil(LAUNCH_COST / (reads_saved * numbers))
        if requests <= most:
            found[length] = requests
    return found


class CascadeBuffers:
    """Build the metadata of a cascade; own the tensors that captured CUDA graphs read for it."""

    def __init__(self, requests: int, sequences: int, device: torch.device) -> None:
        """Allocate for canvases of so many `sequences` each."""
        self.sequences_per_request = sequences
        self.named: tuple[str, ...] | None = None
        self.keys = torch.zeros(requests * sequences, dtype=torch.int32, device=device)
        self.context = torch.zeros(requests, dtype=torch.int32, device=device)
        self.request = self.keys.new_zeros(len(self.keys), 1)

    def lay_out(self, stops: np.ndarray) -> None:
        """Take the canvas positions ``[R, sequences per request]`` where the sequences end."""
        self._number_requests()
        stops_B = stops.ravel().astype(np.int32)
        async_tensor_h2d(stops_B, out=self.keys[: stops.size])
        self.keys[stops.size :] = 0
        self.context[len(stops) :] = 0

    def _number_requests(self) -> None:
        """Write whose sequences they are: all of them, since sleep mode may have taken the buffer.

        vLLM's sleep mode does so while no request is left, so names of requests show it.
        """
        every = torch.arange(
            len(self.context), dtype=torch.int32, device=self.request.device
        )
        self.request.view(-1, self.sequences_per_request).copy_(every[:, None])

    def take_floating(self, batch: InputBatch, length: int, seq_lens: Tensor) -> None:
        """Take how many keys, context included, run, parts of the window and rest see.

        Args:
            length: positions that each canvas computes.
            seq_lens: int32 ``[B]``; of padding nothing is seen.
        """
        names = tuple(batch.req_ids)
        if names != self.named:
            self._number_requests()
            self.named = names
        canvases = batch.num_reqs
        slots = self.sequences_per_request
        padded = len(seq_lens) // slots
        self.context[canvases:padded].zero_()
        torch.sub(batch.seq_lens[:canvases], length, out=self.context[:canvases])
        keys_RS = self.keys[: len(seq_lens)].view(padded, slots)
        torch.sub(
            seq_lens.view(padded, slots), self.context[:padded, None], out=keys_RS
        )

    def build(
        self,
        batch: InputBatch,
        length: int,
        start_loc: Tensor,
        groups: KVGroups,
    ) -> dict[str, Any]:
        """Build the metadata of a step of `length` positions each.

        Args:
            start_loc: int32 ``[B + 1]`` where the sequences of the suffix begin, padding included.
        """
        count = len(start_loc) - 1
        canvases = batch.num_reqs
        padded = count // self.sequences_per_request
        torch.sub(batch.seq_lens[:canvases], length, out=self.context[:canvases])
        keys = self.keys[:count]
        request = self.request[:count]
        suffix = CanvasSuffix(start_loc, keys, request, length)
        starts_np = batch.query_start_loc_np[: padded + 1]
        return build_attn_metadata(
            num_reqs=padded,
            num_tokens=padded * length,
            query_start_loc_gpu=batch.query_start_loc[: padded + 1],
            query_start_loc_cpu=torch.from_numpy(starts_np),
            max_query_len=length,
            seq_lens=self.context[:padded],
            causal=False,
            model_specific_attn_metadata=ExtraArguments(canvas_suffix=suffix),
            **groups._asdict(),
        )
