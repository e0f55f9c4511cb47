"""Captured canvases on FlashAttention in two parts: the context once, the canvas by rows, merged.

Rows read the context of their request once per block. Where heads have keys of their own, several
blocks are open and enough requests run, reading is what takes the time
(benchmarks/reports/attention.md): here the whole canvas is one row on the context, each block a row
on the keys of this pass, and both are merged by log-sum-exp (:mod:`layouts.flash`).
R requests, B rows, T tokens, C canvas positions.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata
from vllm.v1.worker.utils import AttentionGroup

from dllm_plugin.config.decode import get_decode_config

# Four query heads per KV head lose everywhere up to contexts of 4,096: products bound them.
MOST_HEADS_PER_KEY = 1
# At contexts of 1,024 tokens a second launch costs as much as reading again so many numbers per
# position of a context, and the merge of so many canvas positions as much as one such reading.
READ_AGAIN, MERGED = 21_845, 80


class CanvasParts(ModelSpecificAttnMetadata):
    """What vLLM hands on to the builder beside one row per request.

    start_loc int32 ``[B + 1]``, first query of each block; keys int32 ``[B]``, how much of its
    canvas it sees; request int32 ``[B, 1]``; length of a canvas.
    """

    def __init__(self, start_loc: Tensor, keys: Tensor, request: Tensor, length: int) -> None:
        self.start_loc, self.keys, self.request = start_loc, keys, request
        self.length = length

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        """The same for every KV cache group."""
        return {"canvas_rows": self}


def fewest_requests(vllm_config: VllmConfig) -> int | None:
    """From how many requests on this model's captured steps are faster in two parts; None: never.

    Where blocks commit alone, a step may see keys that earlier ones have left: rows read them.
    """
    model, config = vllm_config.model_config, get_decode_config(vllm_config)
    parallel = vllm_config.parallel_config
    heads, kv_heads = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
    assert config.canvas_length is not None and config.block_length is not None
    blocks = config.canvas_length // config.block_length
    saved = blocks - 1 - config.canvas_length / MERGED
    apart = config.dedicated_commit or model.get_sliding_window() is not None
    if apart or saved <= 0 or heads > MOST_HEADS_PER_KEY * kv_heads:
        return None
    fewest = math.ceil(READ_AGAIN / (saved * kv_heads * model.get_head_size()))
    return fewest if fewest <= vllm_config.scheduler_config.max_num_seqs else None


class PartsBuffers:
    """Builds metadata with one row per request; owns what captured CUDA graphs read beside it."""

    def __init__(self, requests: int, rows_per_request: int, length: int, device: Any) -> None:
        self.rows_per_request, self.length = rows_per_request, length
        self.keys = torch.zeros(requests * rows_per_request, dtype=torch.int32, device=device)
        self.context = torch.zeros(requests, dtype=torch.int32, device=device)
        self.request = self.keys.new_zeros(len(self.keys), 1)

    def lay_out(self, stops: np.ndarray) -> None:
        """Take the canvas positions ``[R, rows per request]`` where each request's rows end."""
        # All of it, since vLLM's sleep mode may have taken the buffers.
        every = torch.arange(len(self.context), dtype=torch.int32, device=self.request.device)
        self.request.view(-1, self.rows_per_request).copy_(every[:, None])
        async_tensor_h2d(stops.ravel().astype(np.int32), out=self.keys[: stops.size])
        self.keys[stops.size :] = 0
        self.context[len(stops) :] = 0

    def build(
        self,
        batch: InputBatch,
        start_loc: Tensor,
        max_seq_len: int,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
    ) -> dict[str, Any]:
        """Metadata of one captured step, whose rows begin at `start_loc`."""
        canvases, padded = batch.num_reqs, batch.num_reqs_after_padding
        torch.sub(batch.seq_lens[:canvases], self.length, out=self.context[:canvases])
        num_rows = padded * self.rows_per_request
        rows = CanvasParts(start_loc, self.keys[:num_rows], self.request[:num_rows], self.length)
        return build_attn_metadata(
            num_reqs=padded,
            num_tokens=batch.num_tokens_after_padding,
            query_start_loc_gpu=batch.query_start_loc[: padded + 1],
            query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np[: padded + 1]),
            max_query_len=self.length,
            seq_lens=self.context[:padded],
            causal=False,
            positions=batch.positions,
            model_specific_attn_metadata=rows,
            max_seq_len=max_seq_len,
            block_tables=block_tables,
            slot_mappings=slot_mappings,
            attn_groups=attn_groups,
            kv_cache_config=kv_cache_config,
        )
