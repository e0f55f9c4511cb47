"""Compute the memory of a checkpoint from its configuration, before any weight is there."""

from dataclasses import dataclass
from typing import Any

EIGHT_BITS, FOUR_BITS = 1.0, 4.25 / 8  # bytes; four bits with a scale per 128 weights
OF_FOUR_BITS = ("awq", "gptq", "bitsandbytes", "fp4", "int4")
GRAPHS = 10**9  # bytes of CUDA graphs and activations, rounded up


@dataclass(frozen=True)
class Sizes:
    """Count weights and the keys and values of a model.

    Attributes:
        layers: weights of the layers' matrices, which quantisation stores in fewer bytes.
        tables: weights of the embedding and the LM head, which stay in 16 bits.
        kv_values: numbers that a token adds to the KV cache.
    """

    layers: float
    tables: float
    kv_values: int

    def weight_bytes(self, layer_bytes: float = 2, table_bytes: float = 2) -> float:
        """Return the bytes of all weights, from the bytes of one."""
        return self.layers * layer_bytes + self.tables * table_bytes


def sizes_of(config: Any) -> Sizes:
    """Count the weights that a Hugging Face configuration describes; norms are left out."""
    values = config.to_dict()
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = config.num_key_value_heads
    head_size = values.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_size * (heads + kv_heads)
    depth = config.num_hidden_layers
    experts = values.get("num_experts") or values.get("num_local_experts") or 0
    sparse = _sparse_layers(values, depth) if experts else 0
    each = 3 * hidden * (values.get("moe_intermediate_size") or 0)
    shared = values.get("num_shared_experts") or 0
    mixture = (experts + shared) * each + experts * hidden
    dense = 3 * hidden * config.intermediate_size
    tables = 1 if config.tie_word_embeddings else 2
    return Sizes(
        layers=depth * attention + sparse * mixture + (depth - sparse) * dense,
        tables=tables * config.vocab_size * hidden,
        kv_values=2 * depth * kv_heads * head_size,
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


def layer_bytes(quantization: str | None, dtype_bytes: int) -> float:
    """Return the bytes of a layer's weight under a quantisation of vLLM."""
    if quantization is None:
        return dtype_bytes
    if any(name in quantization for name in OF_FOUR_BITS):
        return FOUR_BITS
    return EIGHT_BITS
