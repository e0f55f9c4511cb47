"""List the values of config keys that we serve, and refuse other variants of a model."""

from collections.abc import Mapping
from typing import Any

# Options of the training code that no published checkpoint uses: key -> the value that we serve.
# `None` (key absent or null) always means the published default.
LLADA_FIXED: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "clip_qkv": None,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "multi_query_attention": False,
    "rope": True,
    "scale_logits": False,
}
QWEN_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "use_mrope": False,
    "use_sliding_window": False,
}
LLADA_MOE_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_act": "silu",
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rope_scaling": None,
    "routed_scaling_factor": 1,
    "router_num_group": None,
    "router_topk_group": None,
    "shared_expert_intermediate_size": 0,
}
SDAR_FIXED = QWEN_FIXED | {"attention_bias": False}
LLAMA_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
}
NEMOTRON_FIXED = LLAMA_FIXED | {
    "dlm_paradigm": "bidirectional",
    "sliding_window": None,
}
LLADA2_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "moe_router_enable_expert_bias": True,
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,  # the authors' code normalises whatever the key's value
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
}


def refuse_variants(
    model: str, values: Mapping[str, Any], fixed: Mapping[str, Any]
) -> None:
    """Raise ValueError for the first key of `values` that differs from `fixed`."""
    for key, supported in fixed.items():
        value = values.get(key)
        if value is not None and value != supported:
            raise ValueError(
                f"This {model} checkpoint has {key}={value!r} in config.json; "
                f"only {key}={supported!r} is supported."
            )


def shares_experts(config: Any) -> bool:
    """Return whether a LLaDA2 is LLaDA2.2, whose blocks share experts and edit their structure.

    Raises ValueError for a config that has only some of LLaDA2.2's keys.
    """
    keys = ("expert_capacity", "delete_token_id", "split_token_id")
    given = [bool(config.expert_capacity)]
    given += [getattr(config, key) is not None for key in keys[1:]]
    if any(given) and not all(given):
        lacking = keys[given.index(False)]
        raise ValueError(
            f"This checkpoint has some keys of LLaDA2.2 in config.json but no {lacking}; it needs "
            f"{', '.join(keys)}."
        )
    if given[0] and config.expert_capacity < config.num_experts_per_tok:
        raise ValueError(
            f"expert_capacity {config.expert_capacity} in config.json is less than "
            f"num_experts_per_tok {config.num_experts_per_tok}."
        )
    return given[0]
