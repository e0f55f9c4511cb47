"""List the shapes of checkpoint tensors that several architectures share, under Qwen's names.

Every function returns name -> full shape; `config` is a Hugging Face config.
"""

from typing import Any

from dllm_plugin.models.checkpoints.weights import Shapes


def embedding_and_head(config: Any, embedding: str = "model.embed_tokens") -> Shapes:
    """Return the shapes of embedding, final norm and LM head."""
    width, vocab = config.hidden_size, config.vocab_size
    return {
        f"{embedding}.weight": (vocab, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocab, width),
    }


def layer_norms(block: str, config: Any) -> Shapes:
    """Return the shapes of the norms before attention and before the MLP."""
    width = config.hidden_size
    return {
        f"{block}.input_layernorm.weight": (width,),
        f"{block}.post_attention_layernorm.weight": (width,),
    }


def gated_mlp(name: str, width: int, inner: int) -> Shapes:
    """Return the shapes of gate, up and down projection."""
    return {
        f"{name}.gate_proj.weight": (inner, width),
        f"{name}.up_proj.weight": (inner, width),
        f"{name}.down_proj.weight": (width, inner),
    }


def experts(name: str, config: Any) -> Shapes:
    """Return the shapes of the router and every expert of an MoE layer."""
    width, inner = config.hidden_size, config.moe_intermediate_size
    shapes: Shapes = {f"{name}.gate.weight": (config.num_experts, width)}
    for expert in range(config.num_experts):
        shapes |= gated_mlp(f"{name}.experts.{expert}", width, inner)
    return shapes


def attention(name: str, config: Any, head: int, bias: bool, qk_norm: bool) -> Shapes:
    """Return the shapes of query, key, value and output projection and of per-head norms."""
    width = config.hidden_size
    q_width = head * config.num_attention_heads
    kv_width = head * config.num_key_value_heads
    shapes: Shapes = {f"{name}.o_proj.weight": (width, q_width)}
    for letter, outputs in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        shapes[f"{name}.{letter}_proj.weight"] = (outputs, width)
        if bias:
            shapes[f"{name}.{letter}_proj.bias"] = (outputs,)
    if qk_norm:
        shapes |= {f"{name}.q_norm.weight": (head,), f"{name}.k_norm.weight": (head,)}
    return shapes


def qwen2(config: Any) -> Shapes:
    """Return the shapes of a Qwen2: query, key and value have biases, MLPs are dense."""
    head = config.hidden_size // config.num_attention_heads
    return dense(config, head, bias=True)


def llama(config: Any) -> Shapes:
    """Return the shapes of a Llama: own head size, no biases, dense MLPs."""
    return dense(config, config.head_dim, bias=False)


def dense(config: Any, head: int, bias: bool) -> Shapes:
    """Return the shapes of a model without query and key norms and without experts."""
    shapes = embedding_and_head(config)
    for layer in range(config.num_hidden_layers):
        block = f"model.layers.{layer}"
        shapes |= layer_norms(block, config)
        shapes |= attention(
            f"{block}.self_attn", config, head, bias=bias, qk_norm=False
        )
        shapes |= gated_mlp(
            f"{block}.mlp", config.hidden_size, config.intermediate_size
        )
    return shapes


def qwen3(config: Any, sparse_layers: frozenset[int] = frozenset()) -> Shapes:
    """Return the shapes of a Qwen3: own head size, query and key norms, maybe experts."""
    shapes = embedding_and_head(config)
    for layer in range(config.num_hidden_layers):
        block = f"model.layers.{layer}"
        shapes |= layer_norms(block, config)
        shapes |= attention(
            f"{block}.self_attn", config, config.head_dim, bias=False, qk_norm=True
        )
        if layer in sparse_layers:
            shapes |= experts(f"{block}.mlp", config)
        else:
            shapes |= gated_mlp(
                f"{block}.mlp", config.hidden_size, config.intermediate_size
            )
    return shapes
