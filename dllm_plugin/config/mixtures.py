"""Refuse what mixtures of experts would answer by their neighbours, or would ignore."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

# Architectures whose parent class in vLLM can move experts between ranks: it leaves the others as
# they are without a word.
REBALANCED = ("SDARMoeForCausalLM",)
EXPERT = "model.layers.{}.mlp.experts.0.down_proj"  # in every mixture that we have
CHANGE = "fp8_per_channel or fp8_per_block, or weights quantised so,"


class RoutedExperts(nn.Module):
    """Stands in for vLLM's class of this name, which quantisations name as a target."""


def refuse_for_mixtures(vllm_config: VllmConfig) -> None:
    """Raise ValueError naming what the model cannot honour."""
    model_config = vllm_config.model_config
    if vllm_config.parallel_config.enable_eplb and model_config.architecture not in REBALANCED:
        raise ValueError(
            f"enable_eplb has no effect on {model_config.architecture}, whose experts vLLM cannot "
            "move between ranks: leave it out."
        )
    if model_config.is_moe and any(_one_scale(model_config)):
        raise ValueError(
            f"quantization {model_config.quantization!r} scales the activations of all experts by "
            "one number for all rows of a step, so an answer would depend on the requests beside "
            f"it, and on one that is broken: take {CHANGE} which have scales per row."
        )


def _one_scale(model_config: ModelConfig) -> Iterator[bool]:
    """Yield whether a part of the configuration asks for float8 with one scale of a whole step."""
    asked = (model_config.quantization, model_config.quantization_config)
    online = resolve_quantization_config(*asked)
    if online is not None:
        yield online.moe is not None and online.moe.weight == kFp8StaticTensorSym
        yield "fp8_per_tensor" in (online.targets or {}).values()
    stored: dict[str, Any] = model_config.model_arch_config.quantization_config or {}
    if stored.get("quant_method") == "fp8":
        blocks = stored.get("weight_block_size")
        yield blocks is None and stored.get("activation_scheme", "dynamic") == "dynamic"
    if stored.get("quant_method") == "compressed-tensors":
        yield from _compressed_with_one_scale(stored, model_config.get_total_num_hidden_layers())


def _compressed_with_one_scale(stored: dict[str, Any], layers: int) -> Iterator[bool]:
    """Yield for each layer whether vLLM would scale the rows of its experts so, if it has some."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    known = CompressedTensorsConfig.from_config(deepcopy(stored))
    known._add_fused_moe_to_target_scheme_map()
    for layer in range(layers):
        # As vLLM does: all experts follow the first, and its projections must agree.
        scheme: dict[str, Any] = known.get_scheme_dict(RoutedExperts(), EXPERT.format(layer)) or {}
        weights, inputs = scheme.get("weights"), scheme.get("input_activations")
        if weights is not None and inputs is not None:
            spans = {weights.strategy, inputs.strategy}
            yield bool(inputs.dynamic) and spans == {"tensor"}
