"""Hugging Face configs of our models, shaped so that vLLM's Llama and Qwen2 can read them.

At module level because vLLM pickles configs to its workers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig, Qwen2Config

# Variants that the training code knows and no published checkpoint uses: key -> what we serve.
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
DREAM_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "use_mrope": False,
    "use_sliding_window": False,
}


def refuse_variants(model: str, values: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first key of `values` that differs from `fixed`."""
    for key, supported in fixed.items():
        value = values.get(key)
        if value is not None and value != supported:
            raise ValueError(
                f"This {model} checkpoint has {key}={value!r} in config.json; "
                f"only {key}={supported!r} is supported."
            )


class LLaDAConfig(PreTrainedConfig):
    """LLaDA's OLMo-style keys, readable under Llama's names; defaults are LLaDA-8B's.

    Raises ValueError for variants of the architecture that we do not serve.
    """

    model_type = "llada"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
        "hidden_act": "activation_type",
    }
    default_theta = 500000.0

    vocab_size: int = 126464
    embedding_size: int | None = None
    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    mlp_hidden_size: int | None = None
    mlp_ratio: int | float = 4
    max_sequence_length: int = 4096
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    weight_tying: bool = False
    activation_type: str = "silu"
    mask_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    source_name: str | None = None  # `_name_or_path` as the checkpoint's author saved it

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_variants("LLaDA", {**kwargs, "activation_type": self.activation_type}, LLADA_FIXED)
        if self.embedding_size is not None:
            if self.embedding_size < self.vocab_size:
                raise ValueError(
                    f"This LLaDA checkpoint has embedding_size={self.embedding_size} in "
                    f"config.json, less than vocab_size={self.vocab_size}."
                )
            # The weight matrices have embedding_size rows; vLLM sizes them by vocab_size.
            self.vocab_size = self.embedding_size
        if self.n_kv_heads is None:
            self.n_kv_heads = self.n_heads
        if self.mlp_hidden_size is None:
            self.mlp_hidden_size = int(self.mlp_ratio * self.d_model)
        # transformers replaces `_name_or_path` by the path that was opened.
        self.source_name = self.source_name or kwargs.get("_name_or_path")
        super().__post_init__(**kwargs)


class DreamConfig(Qwen2Config):
    """Dream and DiffuCoder: Qwen2's keys and a mask token.

    Raises ValueError for variants of the architecture that we do not serve.
    """

    model_type = "Dream"
    default_theta = 1000000.0

    mask_token_id: int | None = None
    source_name: str | None = None  # `_name_or_path` as the checkpoint's author saved it

    def __post_init__(self, **kwargs: Any) -> None:
        own = {"hidden_act": self.hidden_act, "use_sliding_window": self.use_sliding_window}
        refuse_variants("Dream", {**kwargs, **own}, DREAM_FIXED)
        self.source_name = self.source_name or kwargs.get("_name_or_path")
        super().__post_init__(**kwargs)
