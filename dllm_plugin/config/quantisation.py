"""Refuse quantisations that a machine has no kernels for, or that let requests share a scale.

Refused are also options of mixtures of experts that have no effect.
"""

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8StaticTensorSym,
)
from vllm.platforms import CpuArchEnum, current_platform

from .decode import DecodeConfig

# Compute capabilities whose kernels multiply such numbers: from the first, below the second.
CAPABILITIES = {"fp8": ((8, 9), (99, 0)), "int8": ((8, 0), (10, 0))}


def refuse_quantisation(vllm_config: VllmConfig) -> None:
    """Raise ValueError for a quantisation without kernels here, and for a fusion without one."""
    model_config = vllm_config.model_config
    if vllm_config.compilation_config.pass_config.fuse_attn_quant:
        raise ValueError(
            "fuse_attn_quant needs static scales and an attention backend that quantises its "
            "output, which FlashAttention does not: leave it out of pass_config."
        )
    if current_platform.is_cpu() and is_online(model_config):
        raise ValueError(
            f"quantization {model_config.quantization!r} quantises weights while they load, which "
            "needs a GPU: leave it out, or serve a checkpoint that is stored in 8 bits."
        )
    stored = model_config.model_arch_config.quantization_config or {}
    without_kernels = current_platform.is_cpu() and not may_run_quantised_experts()
    if without_kernels and stores_experts(model_config):
        raise ValueError(
            f"The checkpoint's experts are stored in fewer than 16 bits ({stored['quant_method']})"
            ", which needs a GPU, or a CPU with AMX: serve one whose experts have 16 bits."
        )
    if current_platform.is_cpu() and is_packed(stored) and not runs_packed():
        raise ValueError(
            f"The checkpoint's {model_config.quantization} weights of 4 bits need a CPU with "
            "AVX-512, without which vLLM has no kernel for them: serve one of 8 or 16 bits."
        )
    if current_platform.is_cuda():
        refuse_single_groups(vllm_config)


def refuse_single_groups(vllm_config: VllmConfig) -> None:
    """Raise ValueError for packed experts of which a rank holds one group of scales.

    vLLM would read these scales in a wrong order (its pull request 50196).
    """
    model = vllm_config.model_config
    # The kernels of moe_wna16 take scales as they are.
    if not stores_experts(model) or model.quantization == "moe_wna16":
        return
    stored = model.model_arch_config.quantization_config or {}
    group = group_of_experts(stored, model.get_total_num_hidden_layers() - 1)
    inner = model.hf_text_config.moe_intermediate_size
    parallel = vllm_config.parallel_config
    if not parallel.enable_expert_parallel:
        inner //= parallel.tensor_parallel_size
        inner //= parallel.data_parallel_size
    if inner == group:
        raise ValueError(
            f"Each rank would hold {inner} "
            "numbers of an expert, "
            "one group of scales, "
            "which vLLM reads in a wrong order: "
            "take fewer ranks, "
            "enable_expert_parallel, "
            "or a checkpoint with smaller groups."
        )


def group_of_experts(stored: dict[str, Any], layer: int) -> int | None:
    """Return how many numbers of an expert's row share a scale, if activations have none."""
    if stored["quant_method"] == "compressed-tensors":
        scheme = next(_schemes(stored, [layer]))
        if scheme.get("input_activations") is not None:
            return None
        group: int | None = scheme["weights"].group_size
        return group
    group = stored.get("group_size") or stored.get("q_group_size")
    for pattern, changed in (stored.get("dynamic") or {}).items():
        if re.match(pattern.removeprefix("+:"), EXPERTS.format(layer)):
            return changed.get("group_size", group)
    return group


def stores_experts(model_config: ModelConfig) -> bool:
    """Return whether a model is a mixture whose checkpoint stores its experts quantised."""
    stored = model_config.model_arch_config.quantization_config or {}
    layers = model_config.get_total_num_hidden_layers()
    return model_config.is_moe and quantises_experts(stored, layers)


def quantises_experts(stored: dict[str, Any], layers: int) -> bool:
    """Return whether a checkpoint stores the experts of its last layer quantised."""
    name = EXPERTS.format(layers - 1)
    if stored.get("quant_method") == "compressed-tensors":
        return "weights" in next(_schemes(stored, [layers - 1]))
    for key in LEFT_OUT:
        if any(part in name for part in stored.get(key) or ()):
            return False
    rules = stored.get("dynamic") or ()  # of GPTQ; "-:" leaves out
    if any(re.match(one[2:], name) for one in rules if one.startswith("-:")):
        return False
    return "quant_method" in stored


def may_run_quantised_experts() -> bool:
    """Return whether vLLM has kernels of quantised experts for this CPU, if only of some kinds."""
    if current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        return True
    has_amx = bool(torch.cpu._is_amx_tile_supported())
    return has_amx or current_platform.is_zen_cpu()


def is_packed(stored: dict[str, Any]) -> bool:
    """Return whether a checkpoint packs weights, by its `quantization_config`."""
    forms = {stored.get("format")}
    for group in stored.get("config_groups", {}).values():
        forms.add(group.get("format"))
    return stored.get("quant_method") in PACKED or "pack-quantized" in forms


def runs_packed() -> bool:
    """Return whether vLLM's build for this CPU multiplies packed weights."""
    is_x86 = current_platform.get_cpu_architecture() == CpuArchEnum.X86
    return not is_x86 or bool(torch.cpu._is_avx512_supported())


def is_online(model_config: ModelConfig) -> bool:
    """Return whether weights are quantised while they load."""
    if model_config.model_arch_config.quantization_config is not None:
        return False
    asked = (model_config.quantization, model_config.quantization_config)
    return asked[0] == "fp8" or resolve_quantization_config(*asked) is not None


def check_head(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Raise ValueError if `head_quantization` cannot be honoured."""
    kind = config.head_quantization
    model_config = vllm_config.model_config
    if kind == "none":
        return
    problem = next(_problems_of_head(kind, model_config), None)
    if problem:
        raise ValueError(
            f"head_quantization {kind!r} {problem}: leave head_quantization out."
        )


def _problems_of_head(kind: str, model_config: ModelConfig) -> Iterator[str]:
    """Yield why the LM head cannot be quantised."""
    if not current_platform.is_cuda():
        yield "needs a GPU of NVIDIA"
        return
    first, end = CAPABILITIES[kind]
    capability = current_platform.get_device_capability()
    if capability is not None and not first <= tuple(capability) < end:
        found = ".".join(map(str, capability))
        yield f"has no kernel for GPUs of compute capability {found}"
    if model_config.hf_config.tie_word_embeddings:
        yield "would quantise the embedding, whose weights the LM head shares"
    if torch.float32 in (model_config.dtype, model_config.head_dtype):
        yield "needs hidden states and logits of 16 bits"


# Architectures whose parent class in vLLM can move experts between ranks: it leaves the others as
# they are without a word.
REBALANCED = ("SDARMoeForCausalLM",)
# Modules that checkpoints leave as they are, by GPTQ, AWQ and FP8.
LEFT_OUT = ("modules_to_not_convert", "ignored_layers")
PACKED = ("gptq", "awq", "auto-round")
EXPERTS = "model.layers.{}.mlp.experts"  # in every mixture that we have
CHANGE = "fp8_per_channel or fp8_per_block, or weights quantised so,"


class RoutedExperts(nn.Module):
    """Stand in for vLLM's class of this name, which quantisations name as a target."""


def refuse_for_mixtures(vllm_config: VllmConfig) -> None:
    """Raise ValueError for options that a mixture of experts does not support."""
    model_config = vllm_config.model_config
    if (
        vllm_config.parallel_config.enable_eplb
        and model_config.architecture not in REBALANCED
    ):
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
    """Yield whether a quantisation setting asks for float8 with one scale for a whole step."""
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
        yield from _compressed_with_one_scale(
            stored, model_config.get_total_num_hidden_layers()
        )


def _compressed_with_one_scale(stored: dict[str, Any], layers: int) -> Iterator[bool]:
    """Yield for each layer with experts whether vLLM scales all rows by one number."""
    # As vLLM does: all experts follow the first, and its projections must agree.
    for scheme in _schemes(stored, range(layers)):
        weights = scheme.get("weights")
        inputs = scheme.get("input_activations")
        if weights is not None and inputs is not None:
            spans = {weights.strategy, inputs.strategy}
            yield bool(inputs.dynamic) and spans == {"tensor"}


def _schemes(stored: dict[str, Any], layers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield how compressed-tensors stores the experts of each layer; empty: as they are."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    known = CompressedTensorsConfig.from_config(deepcopy(stored))
    known._add_fused_moe_to_target_scheme_map()
    for layer in layers:
        name = EXPERTS.format(layer) + ".0.down_proj"
        yield known.get_scheme_dict(RoutedExperts(), name) or {}
