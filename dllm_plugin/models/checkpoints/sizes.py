"""Compute the memory of a checkpoint from its configuration, before any weight is there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EIGHT_BITS, FOUR_BITS = 1.0, 4.25 / 8  # bytes; four bits with a scale per 128 weights
OF_FOUR_BITS = ("awq", "gptq", "bitsandbytes", "fp4", "int4")
GRAPHS = 500 * 10**6  # bytes of captured CUDA graphs, an estimate
# Of what libraries load onto a GPU; three engines differed by 0.1 GB.
LIBRARIES = 500 * 10**6

NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class Sizes:
    """Count weights and the keys and values of a model.

    Attributes:
        layers: weights of the layers' matrices, which quantisation stores in fewer bytes.
        tables: weights of the embedding and the LM head, which stay in 16 bits.
        kv_values: numbers that a token adds to the KV cache.
        activations: numbers that a position of a forward has at the same time.
    """

    layers: float
    tables: float
    kv_values: int
    activations: int

    def weight_bytes(self, layer_bytes: float = 2, table_bytes: float = 2) -> float:
        """Return the bytes of all weights, from the bytes of one."""
        return self.layers * layer_bytes + self.tables * table_bytes


def sizes_of(config: Any) -> Sizes:
    """Count the weights that a Hugging Face configuration describes."""
    values = config.to_dict()
    for name in NAMES:
        values[name] = getattr(config, name)
    return count_sizes(values)


def count_sizes(values: dict[str, Any]) -> Sizes:
    """Count the weights of a model from the keys of its ``config.json``; norms are left out."""
    hidden = values["hidden_size"]
    heads = values["num_attention_heads"]
    kv_heads = values["num_key_value_heads"]
    depth = values["num_hidden_layers"]
    head_size = values.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_size * (heads + kv_heads)
    experts = values.get("num_experts") or values.get("num_local_experts") or 0
    sparse = _sparse_layers(values, depth) if experts else 0
    each = values.get("moe_intermediate_size") or 0
    shared = values.get("num_shared_experts") or 0
    mixture = (experts + shared) * 3 * hidden * each + experts * hidden
    dense = 3 * hidden * values["intermediate_size"]
    # Gate, up and their product; with the residual stream, its norm, queries, keys and values.
    widest = values["intermediate_size"]
    if sparse:
        widest = each * ((values.get("num_experts_per_tok") or 1) + shared)
    tables = 1 if values["tie_word_embeddings"] else 2
    return Sizes(
        layers=depth * attention + sparse * mixture + (depth - sparse) * dense,
        tables=tables * values["vocab_size"] * hidden,
        kv_values=2 * depth * kv_heads * head_size,
        activations=2 * hidden + head_size * (heads + 2 * kv_heads) + 3 * widest,
    )


def _sparse_layers(values: dict[str, Any], depth: int) -> int:
    """Return the number of layers with experts."""
    dense = set(values.get("mlp_only_layers") or ())
    dense |= set(range(values.get("first_k_dense_replace") or 0))
    every = values.get("decoder_sparse_step") or 1
    sparse = 0
    for layer in range(depth):
        if layer not in dense and (layer + 1) % every == 0:
            sparse += 1
    return sparse


def kv_item_bytes(cache_dtype: str, model_bytes: int) -> float:
    """Return the bytes of a number in the KV cache, from vLLM's name of its dtype."""
    if "int4" in cache_dtype:
        return 0.5
    return 1 if cache_dtype.startswith(("fp8", "int8")) else model_bytes


def layer_bytes(
    quantization: str | None, dtype_bytes: int, stored: Mapping[str, Any] | None = None
) -> float:
    """Return the bytes of a layer's weight under a quantisation of vLLM.

    `stored`: `quantization_config` of the checkpoint, in which compressed-tensors has its bits.
    """
    if quantization is None:
        return dtype_bytes
    bits = []
    for group in ((stored or {}).get("config_groups") or {}).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        bits += [weights["num_bits"]] if weights else []
    is_packed = set(bits) == {4}
    if is_packed or any(name in quantization for name in OF_FOUR_BITS):
        return FOUR_BITS
    return EIGHT_BITS
