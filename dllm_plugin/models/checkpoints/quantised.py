"""Inspect the kernels that vLLM chose for quantised layers."""

from typing import Any

from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
)

# Attributes of a layer that may own its kernel: compressed-tensors and Quark have a scheme.
OWNERS = ("quant_method", "scheme")


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
