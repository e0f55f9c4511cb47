"""List the shapes of checkpoint tensors that several architectures share, under Qwen's names.

Every function returns name -> full shape; `config` is a Hugging Face config.
"""

from typing import Any

from .weights import Shapes


def gated_mlp(name: str, width: int, inner: int) -> Shapes:
    """Return the shapes of gate, up and down projection."""
    return {
        f"{name}.gate_proj.weight": (inner, width),
        f"{name}.up_proj.weight": (inner, width),
        f"{name}.down_proj.weight": (width, inner),
    }


def experts(name: str, config: Any) -> Shapes:
    """Return the shapes of the router and every expert of an MoE layer."""
    width = config.hidden_size
    inner = config.moe_intermediate_size
    shapes: Shapes = {f"{name}.gate.weight": (config.num_experts, width)}
    for expert in range(config.num_experts):
        shapes |= gated_mlp(f"{name}.experts.{expert}", width, inner)
    return shapes


def attention(name: str, config: Any, bias: bool, qk_norm: bool) -> Shapes:
    """Return the shapes of query, key, value and output projection and of per-head norms."""
    width = config.hidden_size
    heads = config.num_attention_heads
    # The configs of Qwen2 and LLaDA have no head size of their own.
    head = getattr(config, "head_dim", None) or width // heads
    q_width = head * heads
    kv_width = head * config.num_key_value_heads
    shapes: Shapes = {f"{name}.o_proj.weight": (width, q_width)}
    for letter, outputs in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        shapes[f"{name}.{letter}_proj.weight"] = (outputs, width)
        if bias:
            shapes[f"{name}.{letter}_proj.bias"] = (outputs,)
    if qk_norm:
        for letter in "qk":
            shapes[f"{name}.{letter}_norm.weight"] = (head,)
    return shapes


def decoder(config: Any, *, bias: bool = False, qk_norm: bool = False) -> Shapes:
    """Return the shapes of a Llama or Qwen.

    Args:
        bias: query, key and value have biases.
        qk_norm: each head of query and key has a norm.
    """
    width = config.hidden_size
    inner = config.intermediate_size
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (config.vocab_size, width),
    }
    for layer in range(config.num_hidden_layers):
        block = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}.{norm}.weight"] = (width,)
        shapes |= attention(f"{block}.self_attn", config, bias, qk_norm)
        if layer in config.sparse_layers:
            shapes |= experts(f"{block}.mlp", config)
        else:
            shapes |= gated_mlp(f"{block}.mlp", width, inner)
    return shapes
