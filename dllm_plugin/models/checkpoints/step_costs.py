"""Model what a step costs, in units of a small one, from the sizes of a checkpoint.

A small step reads the weights; one more token of context is read beside them at the same speed.
Nothing is measured: :class:`dllm_plugin.decoding.widths.Costs` says how positions are counted.
"""

import torch
from vllm.config import VllmConfig

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.decoding.widths import Costs
from dllm_plugin.models.checkpoints.weights import checkpoint_folder


def step_costs(vllm_config: VllmConfig, config: DecodeConfig) -> Costs:
    """Return the costs of a model's steps; contexts are free where its weights have no files."""
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    folder = checkpoint_folder(model_config.model, model_config.revision, load_config.download_dir)
    files = [] if folder is None else folder.glob("*.safetensors")
    weights = sum(file.stat().st_size for file in files)
    if not weights:
        return Costs()
    # Run and window are sequences of their own, and each reads its context.
    reads = 1.0 if config.kv_cache_layout == "distinct" else 2.0
    return Costs(per_key=_bytes_per_token(vllm_config) / weights, reads=reads)


def _bytes_per_token(vllm_config: VllmConfig) -> int:
    """Return the bytes of keys and values that a token of context has, on all ranks together."""
    model_config = vllm_config.model_config
    dtype = model_config.dtype
    assert isinstance(dtype, torch.dtype)
    kept = vllm_config.cache_config.cache_dtype
    size = 1 if kept.startswith("fp8") else dtype.itemsize
    heads = model_config.get_total_num_kv_heads() * model_config.get_head_size()
    return 2 * heads * size * model_config.get_num_layers(vllm_config.parallel_config)
