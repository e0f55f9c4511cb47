"""Test the LM head of 8 bits, and the checks of quantisations, without an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forwards import forward
from quantised import quantise
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.quantization.utils import quant_utils

from dllm_plugin.models.checkpoints.quantised import (
    DTYPES,
    QuantizedHead,
    check_activation_scales,
    quantise_head,
    quantise_rows,
)
from dllm_plugin.models.checkpoints.unserved import refuse_unserved_files

KINDS = pytest.mark.parametrize("kind", DTYPES)
# Relative error of logits of random weights and hidden states.
ERRORS = {"fp8": 0.045, "int8": 0.015}


def head_of(weight_VH: torch.Tensor, kind: str) -> tuple[nn.Module, QuantizedHead]:
    layer = nn.Module()
    layer.weight = nn.Parameter(weight_VH.clone(), requires_grad=False)
    method = QuantizedHead(DTYPES[kind])
    method.process_weights_after_loading(layer)
    return layer, method


@KINDS
def test_logits_are_near_those_of_16_bits(kind: str) -> None:
    torch.manual_seed(0)
    weight_VH, x_TH = torch.randn(96, 256) * 0.02, torch.randn(33, 256)
    x_TH[1] *= 1000  # a row that would coarsen the others under a common scale
    weight_VH[5] *= 1000
    weight_VH[7] = 0  # as padding
    layer, method = head_of(weight_VH, kind)
    assert layer.weight.dtype == DTYPES[kind] and layer.weight_scale.shape == (96, 1)
    found, wanted = method.apply(layer, x_TH), x_TH @ weight_VH.t()
    assert found.dtype == x_TH.dtype and not found[:, 7].any()
    places = [
        (slice(2, None), slice(8, None)),
        (1, slice(8, None)),
        (slice(2, None), 5),
    ]
    for rows, columns in places:
        error = found[rows, columns] - wanted[rows, columns]
        assert error.norm() < ERRORS[kind] * wanted[rows, columns].norm()


@KINDS
def test_logits_of_a_row_do_not_depend_on_its_neighbours(kind: str) -> None:
    torch.manual_seed(1)
    layer, method = head_of(torch.randn(64, 128), kind)
    rows, others = torch.randn(3, 128), 50 * torch.randn(5, 128)
    beside, _ = method.quantise(torch.cat([others, rows]))
    alone, scale = method.quantise(rows)
    assert torch.equal(beside[5:].float(), alone.float())
    logits = method.multiply(layer, alone, scale, torch.float32)
    assert torch.equal(logits, method.apply(layer, rows))


@KINDS
def test_the_largest_number_of_a_row_is_exact(kind: str) -> None:
    rows = torch.tensor([[0.5, -2.0, 0.25], [0.0, 0.0, 0.0]])
    stored, scale = quantise_rows(rows, DTYPES[kind])
    assert (stored.float() * scale)[0, 1] == -2.0
    assert not stored[1].float().any() and scale[1] > 0


@KINDS
def test_new_weights_are_quantised_again(kind: str) -> None:
    """vLLM's reload restores the 16-bit parameter, and then calls the same method."""
    first, second = torch.randn(2, 64, 32)
    layer, method = head_of(first, kind)
    kept = layer.weight.data
    method.process_weights_after_loading(layer)
    assert layer.weight.data is not None and layer.weight.data_ptr() == kept.data_ptr()
    layer.weight = nn.Parameter(second, requires_grad=False)
    method.process_weights_after_loading(layer)
    fresh, _ = head_of(second, kind)
    assert torch.equal(layer.weight.float(), fresh.weight.float())
    assert torch.equal(layer.weight_scale, fresh.weight_scale)


def test_a_model_computes_logits_with_a_head_of_8_bits(
    checkpoints: Path, load_model: Callable[..., Any]
) -> None:
    """On a CPU by the reference arithmetic, as the engine refuses the option there."""
    model = load_model(checkpoints / "tiny-llada", dtype="float32")
    wanted = forward(model, [5, 6, 7, 8], [4])
    quantise_head(model.lm_head, "int8")
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    found = forward(model, [5, 6, 7, 8], [4])
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.05


def test_a_head_that_is_stored_quantised_is_refused() -> None:
    head, _ = head_of(torch.randn(64, 32), "fp8")
    head.quant_method = QuantizedHead(DTYPES["fp8"])
    with pytest.raises(ValueError, match="'int8' has no effect on an LM head that"):
        quantise_head(head, "int8")


def test_a_head_of_odd_sizes_is_refused(
    checkpoints: Path, load_model: Callable[..., Any]
) -> None:
    head = load_model(checkpoints / "tiny-llada", dtype="float32").lm_head
    head.weight = nn.Parameter(torch.ones(64, 40), requires_grad=False)
    with pytest.raises(ValueError, match=r"multiples of 16, got \(64, 40\)"):
        quantise_head(head, "fp8")


REFUSED = [
    ({"additional_config": {"dllm": {"head_quantization": "fp8"}}}, "needs a GPU of"),
    (
        {"additional_config": {"dllm": {"head_quantization": "fp4"}}},
        "head_quantization 'fp4' is unknown; choose one of: none, fp8, int8",
    ),
    (
        {"compilation_config": {"pass_config": {"fuse_attn_quant": True}}},
        "fuse_attn_quant needs static scales",
    ),
    *(
        ({"quantization": name}, f"quantization '{name}' quantises .* needs a GPU")
        for name in ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
    ),
    ({"quantization_config": {"linear": "fp8_per_block"}}, "while they load, which"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=str)
def test_what_this_machine_cannot_do_is_refused(
    options: dict[str, Any],
    sentence: str,
    checkpoints: Path,
    vllm_config_for: Callable[..., Any],
) -> None:
    given = options | {"dtype": "bfloat16"}
    with pytest.raises(ValueError, match=sentence):
        vllm_config_for(checkpoints / "tiny-llada", **given)


@pytest.mark.parametrize("method", ["bitsandbytes", "gguf"])
def test_formats_without_a_loader_are_named(method: str) -> None:
    stored = {"quantization_config": {"quant_method": method}}
    with pytest.raises(ValueError, match=f"some/model is stored as {method}, which"):
        refuse_unserved_files("some/model", stored)
    refuse_unserved_files("some/model", {"quantization_config": None})


class Owner:
    """Own a kernel, as vLLM's quantisation methods and schemes do."""

    def __init__(self, per_token: bool) -> None:
        keys = (quant_utils.kFp8DynamicTensorSym, quant_utils.kFp8DynamicTokenSym)
        kernels = (
            PerTensorTorchFP8ScaledMMLinearKernel,
            ChannelWiseTorchFP8ScaledMMLinearKernel,
        )
        self.fp8_linear = init_fp8_linear_kernel(
            activation_quant_key=keys[per_token],
            weight_quant_key=quant_utils.kFp8StaticTensorSym,
            input_dtype=torch.bfloat16,
            out_dtype=torch.bfloat16,
            weight_shape=(64, 64),
            force_kernel=kernels[per_token],
        )


@pytest.mark.parametrize("attribute", ["quant_method", "scheme"])
def test_one_scale_for_the_rows_of_a_step_is_refused(
    attribute: str, checkpoints: Path, vllm_config_for: Callable[..., Any]
) -> None:
    config = vllm_config_for(checkpoints / "tiny-llada")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with set_current_vllm_config(config):
        owners = [Owner(per_token) for per_token in (True, False)]
    setattr(model[1], attribute, owners[0])
    check_activation_scales(model)
    setattr(model[1], attribute, owners[1])
    with pytest.raises(ValueError, match="^1 is quantised with one scale"):
        check_activation_scales(model)


def test_only_weights_of_8_bits_are_served(
    checkpoint: Callable[..., Path], load_model: Callable[..., Any]
) -> None:
    path = quantise(checkpoint("tiny-llada"), "tiny-llada", "float")
    check_activation_scales(load_model(path, dtype="bfloat16"))
