"""Time the GEMMs of an engine's own layers, for the floor of quantised weights.

The kernels are those that vLLM chose, on weights as the engine stores them. Inputs of float8 GEMMs
are quantised before the timing starts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase

from diffuplug_bench.step.floor import (
    Floor,
    Forward,
    Times,
    Wanted,
    floor_of,
    time_gemms,
)
from dllm_plugin.models.checkpoints.quantised import QuantizedHead, scaled_kernel

if TYPE_CHECKING:
    from vllm import LLM


def measure(llm: "LLM", wanted: Wanted, rate: float, kv_item: float) -> Floor:
    """Return the limits of a step in this engine; arguments as of :func:`floor.measure`."""
    arguments = (list(wanted.positions), wanted.most)
    whole, layers, head = llm.collective_rpc("time_gemms", args=arguments)[0]
    return floor_of((whole, layers, head), rate, kv_item)


@torch.inference_mode()
def time_model(model: Any, wanted: Wanted) -> Times:
    """Time the GEMMs of all linear layers of a model, and of its LM head, on this rank."""
    layers = [layer for layer in model.modules() if isinstance(layer, LinearBase)]
    weight = model.model.norm.weight
    of_layers = partial(forward_of, layers, weight)
    of_head = partial(forward_of, [model.lm_head], weight)
    return time_gemms(of_layers, of_head, wanted, weight.device)


def forward_of(layers: Sequence[nn.Module], like: Tensor, count: int) -> Forward:
    """Return a function that runs the GEMMs of `layers` over `count` rows; their operations."""
    calls, work = [], 0.0
    inputs: dict[int, Tensor] = {}
    for layer in layers:
        rows, columns = _sizes_of(layer)
        if columns not in inputs:
            inputs[columns] = like.new_empty((count, columns)).normal_()
        calls.append(gemm_of(layer, inputs[columns]))
        work += 2.0 * count * rows * columns

    def run() -> None:
        for call in calls:
            call()

    return run, work


def _sizes_of(layer: Any) -> tuple[int, int]:
    """Return the outputs and inputs of a layer on this rank."""
    sizes = ("num_embeddings_per_partition", "embedding_dim")
    if isinstance(layer, LinearBase):
        sizes = ("output_size_per_partition", "input_size_per_partition")
    rows, columns = (getattr(layer, name) for name in sizes)
    return rows, columns


def gemm_of(layer: Any, inputs: Tensor) -> Callable[[], Any]:
    """Return a function that multiplies `inputs` by a layer's weight, quantised by now."""
    method, kernel = layer.quant_method, scaled_kernel(layer)
    if isinstance(method, QuantizedHead):
        given = method.quantise(inputs)
        return partial(method.multiply, layer, *given, inputs.dtype)
    if kernel is None:
        return partial(method.apply, layer, inputs)
    weight, weight_scale, static_scale, bound = kernel._get_layer_params(layer)
    quantised, scale = kernel.quant_fp8(inputs, static_scale, bound)
    return partial(
        kernel.apply_scaled_mm,
        A=quantised,
        B=weight,
        out_dtype=inputs.dtype,
        As=scale,
        Bs=weight_scale,
        bias=None,
        output_shape=[len(inputs), weight.shape[1]],
    )
