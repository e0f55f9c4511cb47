"""Define the base classes of our configs, which refuse variants of a model."""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import (
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.configuration_llama import LlamaConfig

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


class DiffusionConfig(PreTrainedConfig):
    """Check a config and add what all our configs have; comes before the parent's class.

    Raises ValueError for variants of the architecture that we do not serve.
    """

    label: ClassVar[str] = ""
    fixed: ClassVar[Mapping[str, Any]] = {}
    # Of repositories that ship Python code for theirs; else tokenizer_config.json names it.
    tokenizer: ClassVar[type[PreTrainedTokenizerBase] | None] = None

    mask_token_id: int | None = None
    # `_name_or_path` as the checkpoint's author saved it
    source_name: str | None = None
    # Whether `--dtype` is `auto`; None where vLLM's own choice stays (`engine/auto_dtype.py`).
    dtype_left_open: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_variants(self.label, {**kwargs, **vars(self)}, self.fixed)
        # transformers replaces `_name_or_path` by the path that was opened.
        self.source_name = self.source_name or kwargs.get("_name_or_path")
        super().__post_init__(**kwargs)


class OfQwen2(DiffusionConfig, Qwen2Config):
    """Read the keys of a Qwen2."""

    fixed = QWEN_FIXED
    default_theta = 1000000.0


class OfQwen3(DiffusionConfig, Qwen3Config):
    """Read the keys of a Qwen3."""

    fixed = SDAR_FIXED
    default_theta = 1000000.0


class OfLlama(DiffusionConfig, LlamaConfig):
    """Read the keys of a Llama."""

    fixed = LLAMA_FIXED
