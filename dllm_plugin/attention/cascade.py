"""Plan cascade attention of captured canvases: the context is the prefix, the canvas the suffix.

Without a cascade, every block of a canvas is a sequence that reads the whole context. Where every
query head has keys of its own, several blocks are open and enough requests run, these reads take
most of the time (benchmarks/reports/attention.md). With a cascade, one call of FlashAttention 3
attends from the whole canvas to the context, one sequence per request. A second call attends from
each block to the keys that this forward computed, one sequence per block. Both results are merged
by their log-sum-exp (:mod:`dllm_plugin.attention.flash`).

R requests, B sequences, T tokens, C canvas positions.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import is_quantized_kv_cache
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata

from dllm_plugin.attention.backends import FLASH_ATTN
from dllm_plugin.attention.kv_groups import KVGroups
from dllm_plugin.config.decode import get_decode_config

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

# Four query heads per KV head lose everywhere up to contexts of 4,096: GEMMs bound them.
MAX_HEADS_PER_KV_HEAD = 1
# Measured at contexts of 1,024 tokens. A second launch costs as much as reading this many numbers
# per context position once more.
LAUNCH_COST = 21_845
# Merging the results of this many canvas positions costs as much as reading the context once more.
POSITIONS_PER_READ = 80


class CanvasSuffix(ModelSpecificAttnMetadata):
    """Describe the sequences of the suffix, for the backend's metadata builder.

    start_loc int32 ``[B + 1]``, first query of each block; keys int32 ``[B]``, how many positions
    of its canvas a block sees; request int32 ``[B, 1]``; length, positions of a canvas.
    """

    def __init__(self, start_loc: Tensor, keys: Tensor, request: Tensor, length: int) -> None:
        self.start_loc, self.keys, self.request = start_loc, keys, request
        self.length = length

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        """Return the same arguments for every KV cache group."""
        return {"canvas_suffix": self}


def cascade_min_requests(vllm_config: VllmConfig, flash_version: int | None) -> int | None:
    """Return from how many requests on captured steps are faster with a cascade; None: never.

    It needs FlashAttention 3 and unquantised keys, and is left out where results may not depend on
    how many requests run (VLLM_BATCH_INVARIANT). It is left out too where blocks commit in forwards
    of their own: such a step may see canvas keys that earlier steps computed, and the suffix holds
    those of this forward alone.
    """
    chosen = vllm_config.attention_config.backend == FLASH_ATTN and flash_version == 3
    quantised = is_quantized_kv_cache(vllm_config.cache_config.cache_dtype)
    if not chosen or quantised or envs.VLLM_BATCH_INVARIANT:
        return None
    model, config = vllm_config.model_config, get_decode_config(vllm_config)
    parallel = vllm_config.parallel_config
    heads, kv_heads = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
    blocks = config.canvas_length // config.block_length
    reads_saved = blocks - 1 - config.canvas_length / POSITIONS_PER_READ
    unsupported = config.dedicated_commit or config.method.floats or config.method.full_attention
    unsupported |= model.get_sliding_window() is not None
    if unsupported or reads_saved <= 0 or heads > MAX_HEADS_PER_KV_HEAD * kv_heads:
        return None
    fewest = math.ceil(LAUNCH_COST / (reads_saved * kv_heads * model.get_head_size()))
    return fewest if fewest <= vllm_config.scheduler_config.max_num_seqs else None


class CascadeBuffers:
    """Build the metadata of a cascade; own the tensors that captured CUDA graphs read for it."""

    def __init__(self, requests: int, sequences: int, length: int, device: torch.device) -> None:
        """Allocate for canvases of `length` positions and so many `sequences` each."""
        self.sequences_per_request, self.length = sequences, length
        self.keys = torch.zeros(requests * sequences, dtype=torch.int32, device=device)
        self.context = torch.zeros(requests, dtype=torch.int32, device=device)
        self.request = self.keys.new_zeros(len(self.keys), 1)

    def lay_out(self, stops: np.ndarray) -> None:
        """Take the canvas positions ``[R, sequences per request]`` where the sequences end."""
        # All of it, since vLLM's sleep mode may have taken the buffers.
        every = torch.arange(len(self.context), dtype=torch.int32, device=self.request.device)
        self.request.view(-1, self.sequences_per_request).copy_(every[:, None])
        async_tensor_h2d(stops.ravel().astype(np.int32), out=self.keys[: stops.size])
        self.keys[stops.size :] = 0
        self.context[len(stops) :] = 0

    def build(
        self, batch: "InputBatch", start_loc: Tensor, max_seq_len: int, groups: KVGroups
    ) -> dict[str, Any]:
        """Build the metadata of one captured step, whose suffix sequences begin at `start_loc`."""
        canvases, padded = batch.num_reqs, batch.num_reqs_after_padding
        torch.sub(batch.seq_lens[:canvases], self.length, out=self.context[:canvases])
        count = padded * self.sequences_per_request
        suffix = CanvasSuffix(start_loc, self.keys[:count], self.request[:count], self.length)
        return build_attn_metadata(
            num_reqs=padded,
            num_tokens=batch.num_tokens_after_padding,
            query_start_loc_gpu=batch.query_start_loc[: padded + 1],
            query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np[: padded + 1]),
            max_query_len=self.length,
            seq_lens=self.context[:padded],
            max_seq_len=max_seq_len,
            positions=batch.positions,
            causal=False,
            model_specific_attn_metadata=suffix,
            **groups._asdict(),
        )
