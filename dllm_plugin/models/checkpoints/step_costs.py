"""Return step costs: measured at graph capture, or by a model of large GPUs.

The model counts in units of a small step, from the sizes of a checkpoint. Such a step reads the
weights, of a mixture those of the experts that are chosen. More context is read beside them, and
more experts by more positions.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.transformers_utils.config import get_safetensors_params_metadata

from dllm_plugin.config.cuda_graphs import captured_graphs
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.quantisation import is_online
from dllm_plugin.config.step_times import load, own_path
from dllm_plugin.decoding.step_costs import (
    Costs,
    MeasuredCosts,
    StepCosts,
    WeightBytes,
    costs_of,
)

from .sizes import kv_item_bytes, layer_bytes, sizes_of
from .weights import folder_of

EXPERTS = ".experts."  # in the names of their tensors


def step_costs(vllm_config: VllmConfig, config: DecodeConfig) -> StepCosts:
    """Return the costs of steps: measured costs, or else costs of the model."""
    path = own_path(vllm_config)
    times = None if path is None else load(path)
    if times is None:
        return model_costs(vllm_config, config)
    return MeasuredCosts(
        times.positions,
        times.ms,
        times.per_key,
        config.context_reads,
        captured_graphs(vllm_config, config),
    )


def model_costs(vllm_config: VllmConfig, config: DecodeConfig) -> Costs:
    """Return the model's costs; context costs nothing if there are no weight files."""
    folder = folder_of(vllm_config)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    if not files:
        return Costs()
    weights = weight_bytes(vllm_config, files)
    return costs_of(weights, _bytes_per_token(vllm_config), config.context_reads)


def weight_bytes(vllm_config: VllmConfig, files: Sequence[Path]) -> WeightBytes:
    """Return what steps read of the weights in these safetensors files."""
    model_config = vllm_config.model_config
    kept = _kept_share(model_config)
    stored = kept * sum(file.stat().st_size for file in files)
    experts = model_config.get_num_experts()
    of_experts = kept * _bytes_of_experts(files[0].parent) if experts else 0
    if not of_experts:
        return WeightBytes(stored)
    chosen = model_config.hf_text_config.num_experts_per_tok
    expert = of_experts / experts
    small = stored - (experts - chosen) * expert
    return WeightBytes(small, expert, experts, chosen)


def _kept_share(model_config: ModelConfig) -> float:
    """Return the share of its bytes that a checkpoint keeps if it is quantised at load."""
    if not is_online(model_config):
        return 1.0
    sizes = sizes_of(model_config.hf_text_config)
    each = layer_bytes(model_config.quantization, 2)
    return sizes.weight_bytes(each) / sizes.weight_bytes()


def _bytes_of_experts(folder: Path) -> int:
    """Return how much of a folder's safetensors files is experts, by their headers."""
    total = 0
    for name, entry in get_safetensors_params_metadata(str(folder)).items():
        if EXPERTS in name:
            begin, end = entry["data_offsets"]
            total += end - begin
    return total


def _bytes_per_token(vllm_config: VllmConfig) -> float:
    """Return the bytes of keys and values that a token of context has, on all ranks together."""
    model_config = vllm_config.model_config
    dtype = model_config.dtype
    assert isinstance(dtype, torch.dtype)
    size = kv_item_bytes(vllm_config.cache_config.cache_dtype, dtype.itemsize)
    depth = model_config.get_num_layers(vllm_config.parallel_config)
    heads = model_config.get_total_num_kv_heads()
    return 2 * depth * heads * model_config.get_head_size() * size
