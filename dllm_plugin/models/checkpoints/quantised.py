"""Store the LM head in 8 bits, and inspect the kernels that vLLM chose for quantised layers.

vLLM's online quantisation leaves the head in 16 bits. Here each row of the weight and of hidden
states has a scale, so logits do not depend on the other rows of a step. Shapes: T rows, H hidden
size, V columns of this rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.utils import replace_parameter

DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
LEAST_SCALE = 1e-12  # of rows of zeros, as padding has
ROWS = 8192  # of the weight that are float32 at the same time
ALIGNED_TO = 16  # what CUTLASS needs of rows and columns
# Attributes of a layer that may own its kernel: compressed-tensors and Quark have a scheme.
OWNERS = ("quant_method", "scheme")


def quantise_head(head: Any, kind: str) -> None:
    """Let a head be quantised once its weights are loaded, and after every update of them.

    Raises ValueError for a head that the checkpoint stores quantised, or of other sizes than the
    kernel takes.
    """
    plain = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    if not isinstance(head.quant_method, plain):
        raise ValueError(
            f"head_quantization {kind!r} has no effect on an LM head that the checkpoint stores "
            "quantised: leave head_quantization out."
        )
    if any(size % ALIGNED_TO for size in head.weight.shape):
        raise ValueError(
            f"head_quantization {kind!r} needs an LM head whose sizes are multiples of "
            f"{ALIGNED_TO}, got {tuple(head.weight.shape)}: leave head_quantization out."
        )
    head.quant_method = QuantizedHead(DTYPES[kind])


class QuantizedHead(QuantizeMethodBase):
    """Multiply hidden states by a head of 8 bits, by CUTLASS on GPUs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Fail, as the layer has its weight when it gets this method."""
        raise AssertionError("a head is quantised after its construction")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Quantise the loaded weight; `[V, H]` stays `[V, H]`, with scales `[V, 1]`."""
        weight: Any = layer.weight
        if weight.dtype == self.dtype:
            return
        stored_VH = torch.empty_like(weight, dtype=self.dtype)
        scale_V1 = weight.new_empty((len(weight), 1), dtype=torch.float32)
        for low in range(0, len(weight), ROWS):
            rows = slice(low, low + ROWS)
            stored_VH[rows], scale_V1[rows] = quantise_rows(weight[rows], self.dtype)
        replace_parameter(layer, "weight", stored_VH)
        replace_parameter(layer, "weight_scale", scale_V1)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return logits: ``[T, H]`` -> ``[T, V]``, in the dtype of `x`."""
        assert bias is None, "no served model has a bias here"
        return self.multiply(layer, *self.quantise(x), x.dtype)

    def quantise(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states in 8 bits and their scales ``[T, 1]``."""
        if not x_TH.is_cuda:
            return quantise_rows(x_TH, self.dtype)
        x_TH = x_TH.contiguous()
        if self.dtype == torch.int8:
            stored_TH, scale_T1, _ = ops.scaled_int8_quant(x_TH)
            return stored_TH, scale_T1
        return ops.scaled_fp8_quant(x_TH, use_per_token_if_dynamic=True)

    def multiply(
        self, layer: Any, stored_TH: Tensor, scale_T1: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return logits ``[T, V]`` of quantised hidden states."""
        if not stored_TH.is_cuda:
            logits_TV = stored_TH.float() @ layer.weight.float().t()
            return (logits_TV * scale_T1 * layer.weight_scale.t()).to(dtype)
        weight, scale = layer.weight.t(), layer.weight_scale
        return ops.cutlass_scaled_mm(stored_TH, weight, scale_T1, scale, dtype)


def quantise_rows(rows_NH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows in 8 bits, and float32 scales ``[N, 1]`` by which they are multiplied."""
    values_NH = rows_NH.to(torch.float32)
    largest = LARGEST[dtype]
    scale_N1 = values_NH.abs().amax(dim=1, keepdim=True) / largest
    scale_N1 = scale_N1.clamp_min(LEAST_SCALE)
    scaled_NH = (values_NH / scale_N1).clamp(-largest, largest)
    if dtype == torch.int8:
        scaled_NH = scaled_NH.round()
    return scaled_NH.to(dtype), scale_N1


def scaled_kernel(layer: nn.Module) -> FP8ScaledMMLinearKernel | None:
    """Return the kernel of a layer that multiplies float8 activations by a scale.

    Returns None for other layers, and for kernels that read 16-bit activations: these replace
    `apply_weights`, which quantises them.
    """
    for name in OWNERS:
        owner: Any = vars(layer).get(name)
        kernel = None if owner is None else vars(owner).get("fp8_linear")
        if isinstance(kernel, FP8ScaledMMLinearKernel):
            applies = type(kernel).apply_weights
            if applies is FP8ScaledMMLinearKernel.apply_weights:
                return kernel
    return None


def check_activation_scales(model: nn.Module) -> None:
    """Raise ValueError if a layer scales the activations of a whole step by one number."""
    for name, layer in model.named_modules():
        kernel = scaled_kernel(layer)
        if kernel is None:
            continue
        scale = kernel.config.activation_quant_key.scale
        if not scale.static and scale.group_shape.is_per_tensor():
            raise ValueError(
                f"{name} is quantised with one scale for the activations of all rows of a step, "
                "so an answer would depend on the requests beside it: take fp8_per_channel, or "
                "weights whose activations are scaled per token."
            )
