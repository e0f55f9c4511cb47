"""Test the tensors of quantised checkpoints: each is needed, and each has one shape."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import FORMATS, pack, quantise
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    marlin_permute_scales,
)
from vllm.platforms import CpuArchEnum, current_platform

from dllm_plugin.config.quantisation import (
    group_of_experts,
    is_packed,
    quantises_experts,
    refuse_quantisation,
    runs_packed,
)
from dllm_plugin.models.checkpoints.layouts import Packing
from dllm_plugin.models.checkpoints.weights import CheckedWeights, Manifest

MODULE = "model.layers.0.q_proj"
N, K, GROUP = 64, 128, 32
FP8, FLOAT = torch.float8_e4m3fn, torch.float16
GROUPED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
PER_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def compressed(
    form: str, weights: dict[str, Any], inputs: Any = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]
LAYOUTS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "compressed FP8": (
        compressed("float-quantized", PER_CHANNEL),
        {"weight": ((N, K), FP8), "weight_scale": ((N, 1), FLOAT)},
    ),
    "compressed FP8 with static activations": (
        compressed("float-quantized", PER_CHANNEL, STATIC),
        {
            "weight": ((N, K), FP8),
            "weight_scale": ((N, 1), FLOAT),
            "input_scale": ((1,), FLOAT),
        },
    ),
    "compressed W4A16": (
        compressed("pack-quantized", GROUPED),
        {
            "weight_packed": ((N, K // 8), torch.int32),
            "weight_scale": ((N, K // GROUP), FLOAT),
            "weight_shape": ((2,), torch.int64),
        },
    ),
    "FP8 by block": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        {
            "weight": ((N, K), FP8),
            "weight_scale_inv": ((N // 32, K // 32), torch.float32),
        },
    ),
    "GPTQ": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        {
            "qweight": ((K // 8, N), torch.int32),
            "scales": ((K // GROUP, N), FLOAT),
            "qzeros": ((K // GROUP, N // 8), torch.int32),
            "g_idx": ((K,), torch.int32),
        },
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP},
        {
            "qweight": ((K, N // 8), torch.int32),
            "scales": ((K // GROUP, N), FLOAT),
            "qzeros": ((K // GROUP, N // 8), torch.int32),
        },
    ),
}
CASES = [(name, suffix) for name, (_, found) in LAYOUTS.items() for suffix in found]


def check(name: str, tensors: Tensors) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        f"{MODULE}.weight": (N, K),
        "norm.weight": (K,),
    }
    manifest = Manifest(shapes, packing=Packing.of(LAYOUTS[name][0]))
    weights = [("norm.weight", torch.ones(K))]
    for suffix, (shape, dtype) in tensors.items():
        weights.append((f"{MODULE}.{suffix}", torch.ones(shape).to(dtype)))
    checked = CheckedWeights(manifest)
    assert len(list(checked.part(weights))) == len(weights)
    checked.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_whole_layouts_pass(name: str) -> None:
    check(name, LAYOUTS[name][1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_that_stay_plain_pass(name: str) -> None:
    check(name, {"weight": ((N, K), torch.bfloat16)})
    with pytest.raises(ValueError, match=rf"'{MODULE}.weight' .* asks for \(64, 128\)"):
        check(name, {"weight": ((K, N), torch.bfloat16)})
    with pytest.raises(ValueError, match=f"no weight '{MODULE}.weight'"):
        check(name, {})


@pytest.mark.parametrize(("name", "suffix"), CASES)
def test_each_tensor_is_needed(name: str, suffix: str) -> None:
    tensors = dict(LAYOUTS[name][1])
    del tensors[suffix]
    scale = suffix in ("weight_scale", "weight_scale_inv") and "weight" in tensors
    sentence = f"no scale for quantised weight '{MODULE}'" if scale else ""
    with pytest.raises(ValueError, match=sentence or f"'{MODULE}.{suffix}'"):
        check(name, tensors)


@pytest.mark.parametrize(("name", "suffix"), CASES)
def test_each_tensor_has_its_shape(name: str, suffix: str) -> None:
    tensors = dict(LAYOUTS[name][1])
    shape, dtype = tensors[suffix]
    tensors[suffix] = ((*shape[:-1], shape[-1] + 1), dtype)
    with pytest.raises(ValueError, match=f"Weight '{MODULE}.{suffix}' .* has shape"):
        check(name, tensors)


def test_formats_that_are_unknown_need_a_scale_only() -> None:
    packing = Packing.of({"quant_method": "quark"})
    checked = CheckedWeights(Manifest({f"{MODULE}.weight": (N, K)}, packing=packing))
    stored = [(f"{MODULE}.weight", torch.ones(N, K).to(FP8))]
    list(checked.part([*stored, (f"{MODULE}.input_thing", torch.ones(3))]))
    with pytest.raises(ValueError, match="no scale for quantised weight"):
        checked.finish()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_checkpoints_of_four_bits_load(
    name: str,
    form: str,
    checkpoint: Callable[..., Path],
    checkpoints: Path,
    load_model: Callable[..., Any],
) -> None:
    """vLLM runs these on CPUs with AVX-512; weights are rounded to 15 numbers per group."""
    if not runs_packed():
        with pytest.raises(ValueError, match="4 bits need a CPU with AVX-512"):
            load_model(pack(checkpoint(name), name, form), dtype=torch.bfloat16)
        return
    packed = load_model(pack(checkpoint(name), name, form), dtype=torch.bfloat16)
    plain = load_model(checkpoints / name, dtype=torch.bfloat16)
    rows = torch.randn(5, plain.config.hidden_size).to(torch.bfloat16)
    with torch.inference_mode():
        found = packed.model.layers[0].mlp(rows)
        wanted = plain.model.layers[0].mlp(rows)
    error = (found - wanted).norm() / wanted.norm()
    assert 0.01 < error < 0.4


@pytest.mark.skipif(not current_platform.is_cpu(), reason="GPUs have kernels for them")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["tiny-llada2.1", "tiny-sdar-moe", "tiny-llada-moe"])
def test_experts_of_four_bits_need_a_gpu(
    name: str,
    form: str,
    checkpoint: Callable[..., Path],
    vllm_config_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or AMX, for which vLLM has kernels; refused before weights load."""
    packed = pack(checkpoint(name), name, form)
    x86 = CpuArchEnum.X86
    monkeypatch.setattr(current_platform, "get_cpu_architecture", lambda: x86)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(ValueError, match="experts are stored in fewer than 16 bits"):
        vllm_config_for(packed, dtype="bfloat16")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    assert vllm_config_for(packed, dtype="bfloat16").model_config.is_moe


TWO = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("name", "parallel", "refused"),
    [
        ("tiny-llada2.1", {}, True),
        ("tiny-sdar-moe", {}, False),
        ("tiny-llada-moe", TWO, True),
        ("tiny-sdar-moe", {"data_parallel_size": 2}, True),
        ("tiny-sdar-moe", TWO | {"enable_expert_parallel": True}, False),
        ("tiny-llada2.1", TWO, False),  # vLLM has other kernels for half a group
    ],
)
def test_experts_of_one_group_are_refused_on_gpus(
    name: str,
    parallel: dict[str, Any],
    refused: bool,
    form: str,
    checkpoint: Callable[..., Path],
    vllm_config_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An expert has 32 or 64 numbers inside, a group 32."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    config = vllm_config_for(pack(checkpoint(name), name, form), dtype="bfloat16")
    for option, value in parallel.items():
        setattr(config.parallel_config, option, value)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    if refused:
        with pytest.raises(ValueError, match="hold 32 numbers of an expert, one group"):
            refuse_quantisation(config)
        config.model_config.quantization = "moe_wna16"
    refuse_quantisation(config)


CHANNEL = PER_CHANNEL | {"group_size": None}
WORDINGS: dict[str, dict[str, Any]] = {
    "another format for attention": {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*self_attn.*"],
                "weights": CHANNEL,
                "format": "float-quantized",
            },
            "group_1": {
                "targets": ["re:.*experts.*"],
                "weights": GROUPED,
                "format": "pack-quantized",
            },
        },
    },
    "experts in other groups": {
        "quant_method": "gptq",
        "group_size": 16,
        "dynamic": {r"+:.*mlp\.experts.*": {"group_size": GROUP}},
    },
    "an old key": {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "group_size": GROUP},
}


@pytest.mark.parametrize("wording", WORDINGS)
def test_groups_of_experts_have_several_wordings(wording: str) -> None:
    stored = WORDINGS[wording]
    assert quantises_experts(stored, 2) and is_packed(stored)
    assert group_of_experts(stored, 1) == GROUP


def test_stored_experts_are_not_updated_in_place(
    checkpoint: Callable[..., Path],
    checkpoints: Path,
    load_model: Callable[..., Any],
    vllm_config_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of checkpoints for GPUs: vLLM would leave out scales of experts."""
    name = "tiny-sdar-moe"
    model = load_model(checkpoints / name)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    model.check_packing()
    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    folder = quantise(checkpoint(name), name, "float", experts=True)
    model.vllm_config = vllm_config_for(folder, dtype="bfloat16")
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with pytest.raises(ValueError, match="^Weights of experts that are stored quant"):
        model.check_packing()


def test_vllm_permutes_scales_of_one_group_otherwise() -> None:
    """The first product's scales follow the hidden size; vLLM passes the inner size."""
    scales = torch.arange(4 * 128.0).view(4, 128)  # 128 hidden numbers in groups of 32
    right = marlin_permute_scales(scales, size_k=128, size_n=128, group_size=32)
    for inner, same in ((64, True), (32, False)):
        found = marlin_permute_scales(scales, inner, size_n=128, group_size=32)
        assert found.equal(right) == same
    # If vLLM passes the hidden size one day, `refuse_single_groups` can go.
    passed = (
        "s=marlin_w13_scales,\n        size_k=layer.intermediate_size_per_partition"
    )
    assert passed in inspect.getsource(int_wna16)


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        ({}, False),
        ({"quant_method": "awq", "modules_to_not_convert": None}, True),
        ({"quant_method": "awq", "modules_to_not_convert": ["mlp.gate"]}, True),
        ({"quant_method": "awq", "modules_to_not_convert": ["mlp.experts"]}, False),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.2.mlp"]}, False),
        ({"quant_method": "gptq", "dynamic": {r"-:.*mlp\.gate$": {}}}, True),
        ({"quant_method": "gptq", "dynamic": {r"-:.*experts": {}}}, False),
        (compressed("pack-quantized", GROUPED) | {"ignore": ["re:.*gate$"]}, True),
        (compressed("pack-quantized", GROUPED) | {"ignore": ["re:.*mlp.*"]}, False),
    ],
    ids=str,
)
def test_experts_that_are_left_as_they_are(stored: dict[str, Any], found: bool) -> None:
    assert quantises_experts(stored, 3) is found
