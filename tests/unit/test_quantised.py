"""Quantised checkpoints (compressed-tensors W8A8, which vLLM runs on the CPU as well)."""

import itertools

import pytest
import torch
from forwards import forward
from quantised import DTYPE, MIXTURES, quantise
from safetensors.torch import load_file
from torch.nn.functional import silu
from vllm.config import set_current_vllm_config
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.base import (
    OnlineQuantizationConfig,
)
from vllm.model_executor.model_loader.utils import initialize_model

from diffuplug_bench.step import engine_gemms, floor

BOTH = pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
# Each format of two families, and one of the others.
DENSE = [
    *[("tiny-llada", kind) for kind in ("int", "float")],
    *[("tiny-nemotron", kind) for kind in ("int", "float")],
    *[(f"tiny-{name}", "int") for name in ("dream", "sdar", "a2d-qwen3", "idlm")],
    *[(f"tiny-{name}", "float") for name in ("fast-dllm-v2", "stable-diffcoder")],
    *[("tiny-wedlm", "int"), ("tiny-wedlm-qwen2", "float")],
]
KINDS = pytest.mark.parametrize("kind", ["int", "float"])
# Without VNNI sums of two products of int8 saturate at 16 bits.
MOST_ERROR = 0.1 if torch.cpu._is_vnni_supported() else 0.2
LLADA2_ATTENTION = ("attention.query_key_value", "attention.dense")


def assert_nearly_equal(ours, theirs, paths: tuple[str, ...]) -> None:
    """Compare submodules of every layer on the same random rows."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for mine, other in zip(ours.model.layers, theirs.model.layers, strict=True):
            for path in paths:
                module = other.get_submodule(path)
                width = getattr(module, "input_size", theirs.config.hidden_size)
                rows = torch.randn(5, width, generator=generator).to(DTYPE)
                found, wanted = (
                    layer.get_submodule(path)(rows) for layer in (mine, other)
                )
                found, wanted = (
                    y[0] if isinstance(y, tuple) else y for y in (found, wanted)
                )
                assert (found - wanted).norm() / wanted.norm() < MOST_ERROR, path


@pytest.mark.parametrize(("name", "kind"), DENSE)
def test_quantised_checkpoint_computes_nearly_the_same(
    name, kind, checkpoint, load_model, checkpoints
):
    quantised = load_model(quantise(checkpoint(name), name, kind), dtype=DTYPE)
    plain = load_model(checkpoints / name, dtype=DTYPE)
    assert type(quantised.model.layers[0].mlp.down_proj.quant_method) is not type(
        plain.model.layers[0].mlp.down_proj.quant_method
    )
    assert_nearly_equal(
        quantised, plain, ("self_attn.qkv_proj", "self_attn.o_proj", "mlp")
    )


@KINDS
def test_floor_times_the_layers_of_the_engine(
    kind: str, checkpoint, load_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor, "SECONDS", 0.01)
    model = load_model(
        quantise(checkpoint("tiny-llada"), "tiny-llada", kind), dtype=DTYPE
    )
    times = engine_gemms.time_model(model, floor.Wanted((3,), (20, 9)))
    found = floor.floor_of(times, 1e9, 1)
    assert list(found.gemm_ms) == [3] and list(found.head_ms) == [8, 9]
    assert list(found.layers_ms) == [8, 10, 13, 16, 20]
    layer = model.model.layers[0].mlp.down_proj
    _, work = engine_gemms.forward_of([layer], model.model.norm.weight, 3)
    assert work == 2 * 3 * layer.input_size * layer.output_size


@pytest.mark.parametrize("name", ["tiny-sdar-moe", "tiny-llada2.1"])
def test_floor_gives_experts_equal_rows(
    name: str, load_model, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor, "SECONDS", 0.01)
    model = load_model(checkpoints / name, dtype=DTYPE)
    assert engine_gemms.time_model(model, floor.Wanted((5,)))[0][0][2] > 0
    experts = model.model.layers[1].mlp.experts.routed_experts
    rows = torch.randn(5, experts.hidden_size).to(DTYPE)
    found = engine_gemms.experts_of(experts, rows)().float()
    stored = load_file(checkpoints / name / "model.safetensors")
    wanted = torch.zeros(found.shape)
    for place in range(5 * experts.top_k):
        row, number = place // experts.top_k, place % experts.global_num_experts
        gate, up, down = (
            stored[f"model.layers.1.mlp.experts.{number}.{part}_proj.weight"].float()
            for part in ("gate", "up", "down")
        )
        x = rows[row].float()
        wanted[row] += down @ (silu(gate @ x) * (up @ x)) / experts.top_k
    assert (found - wanted).norm() / wanted.norm() < 0.02
    _, work = engine_gemms.forward_of([experts], rows, 5)
    inner = experts.intermediate_size_per_partition
    assert work == 2 * 5 * experts.top_k * 3 * experts.hidden_size * inner


@pytest.mark.parametrize(
    ("name", "kind"), [*zip(MIXTURES, itertools.cycle(["int", "float"]))]
)
def test_quantised_attention_beside_plain_experts(
    name, kind, checkpoint, load_model, checkpoints
):
    """By layer: behind a router, two roundings may take two experts and be far apart."""
    quantised = load_model(quantise(checkpoint(name), name, kind), dtype=DTYPE)
    plain = load_model(checkpoints / name, dtype=DTYPE)
    ours = ("self_attn.qkv_proj", "self_attn.o_proj")
    ours = LLADA2_ATTENTION if "llada2" in name else ours
    assert_nearly_equal(quantised, plain, ours)
    found, wanted = (forward(model, [5, 6, 7, 8], [4]) for model in (quantised, plain))
    assert found.isfinite().all() and not torch.equal(found, wanted)


@BOTH
@KINDS
def test_missing_scale_is_named(name, kind, checkpoint, load_model):
    module = {"tiny-llada": "model.transformer.blocks.1.q_proj"}.get(
        name, "model.layers.1.self_attn.q_proj"
    )
    path = quantise(checkpoint(name), name, kind, drop=f"{module}.weight_scale")
    with pytest.raises(ValueError, match=f"no scale for quantised weight '{module}'"):
        load_model(path)


def test_missing_quantised_weight_is_named(checkpoint, load_model):
    weight = "model.transformer.blocks.1.ff_norm.weight"
    path = quantise(checkpoint("tiny-llada"), "tiny-llada", "int", drop=weight)
    with pytest.raises(ValueError, match=f"no weight '{weight}'"):
        load_model(path)


def test_adapter_on_quantised_checkpoint_is_refused(checkpoint, load_model):
    path = quantise(checkpoint("tiny-llada"), "tiny-llada", "int")
    options = {"additional_config": {"dllm": {"lora_path": "some/adapter"}}}
    with pytest.raises(
        ValueError, match="Cannot merge lora_path 'some/adapter': .* quantised"
    ):
        load_model(path, **options)


def test_adapter_with_ready_made_parameters_is_refused(checkpoints, load_model):
    options = {
        "additional_config": {"dllm": {"lora_path": "some/adapter"}},
        "load_format": "sharded_state",
    }
    with pytest.raises(ValueError, match="Cannot merge .* load_format='sharded_state'"):
        load_model(checkpoints / "tiny-llada", **options)


def test_routers_are_not_quantised_while_they_load(checkpoint, vllm_config_for):
    """vLLM's Qwen3-MoE hands its router's weights to what quantises online."""
    config = vllm_config_for(checkpoint("tiny-sdar-moe"), dtype=DTYPE)
    args = resolve_quantization_config("fp8_per_channel", None)
    config.quant_config = OnlineQuantizationConfig(args)
    with set_current_vllm_config(config), torch.device("meta"):
        model = initialize_model(config)
    gates = [layer.mlp.gate for layer in model.model.layers]
    kinds = {type(gate.quant_method) for gate in gates}
    assert kinds == {UnquantizedLinearMethod}
    attention = model.model.layers[0].self_attn.o_proj.quant_method
    assert not isinstance(attention, UnquantizedLinearMethod)
