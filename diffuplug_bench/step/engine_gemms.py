"""Time the GEMMs of an engine's own layers, for the floor of quantised weights.

The kernels are those that vLLM chose, on weights as the engine stores them. Inputs of float8 GEMMs
are quantised before the timing starts. Experts are one kernel, which quantises, activates and sums
too; each has equally many rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear

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
    most = wanted.most
    if most is not None:
        # Kernels of experts have a workspace for no more.
        limit = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        most = min(most[0], limit), most[1]
    arguments = (list(wanted.positions), most)
    whole, layers, head = llm.collective_rpc("time_gemms", args=arguments)[0]
    return floor_of((whole, layers, head), rate, kv_item)


@torch.inference_mode()
def time_model(model: Any, wanted: Wanted) -> Times:
    """Time the GEMMs of a model's linear layers, experts and LM head, on this rank."""
    kinds = (LinearBase, RoutedExperts)
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    weight = model.model.norm.weight
    of_layers = partial(forward_of, layers, weight)
    of_head = partial(forward_of, [model.lm_head], weight)
    return time_gemms(of_layers, of_head, wanted, weight.device)


def forward_of(layers: Sequence[nn.Module], like: Tensor, count: int) -> Forward:
    """Return a function that runs the GEMMs of `layers` over `count` rows; their operations."""
    calls, work = [], 0.0
    inputs: dict[int, Tensor] = {}
    for layer in layers:
        weights, columns = _sizes_of(layer)
        if columns not in inputs:
            inputs[columns] = like.new_empty((count, columns)).normal_()
        calls.append(gemm_of(layer, inputs[columns]))
        work += 2.0 * count * weights

    def run() -> None:
        for call in calls:
            call()

    return run, work


def _sizes_of(layer: Any) -> tuple[float, int]:
    """Return how many weights of a layer a row meets here, and its numbers."""
    if isinstance(layer, RoutedExperts):
        each = 3 * layer.hidden_size * layer.intermediate_size_per_partition
        here = layer.local_num_experts / layer.global_num_experts
        return layer.top_k * each * here, layer.hidden_size
    sizes = ("num_embeddings_per_partition", "embedding_dim")
    if isinstance(layer, ReplicatedLinear):
        sizes = ("output_size", "input_size")
    elif isinstance(layer, LinearBase):
        sizes = ("output_size_per_partition", "input_size_per_partition")
    rows, columns = (getattr(layer, name) for name in sizes)
    return rows * columns, columns


def experts_of(layer: RoutedExperts, inputs: Tensor) -> Callable[[], Any]:
    """Return a function that gives experts equally many rows, of ``[T, hidden]``."""
    chosen_TK = torch.arange(len(inputs) * layer.top_k, device=inputs.device)
    chosen_TK = chosen_TK.view(-1, layer.top_k) % layer.global_num_experts
    if layer.quant_method.is_monolithic:
        logits_TE = inputs.new_zeros(len(inputs), layer.global_num_experts)
        logits_TE.scatter_(1, chosen_TK, 1.0)
        return partial(layer.forward_monolithic, inputs, logits_TE)
    chosen_TK = chosen_TK.to(layer.quant_method.topk_indices_dtype or torch.int32)
    shares_TK = torch.full(chosen_TK.shape, 1 / layer.top_k, device=inputs.device)
    return partial(layer.forward_modular, inputs, shares_TK, chosen_TK)


def gemm_of(layer: Any, inputs: Tensor) -> Callable[[], Any]:
    """Return a function that multiplies `inputs` by a layer's weight, quantised by now."""
    if isinstance(layer, RoutedExperts):
        return experts_of(layer, inputs)
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
