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
    # Options of the training code that no published checkpoint uses, and the values that we serve.
    # `None` (key absent or null) always means the published default.
    fixed: ClassVar[Mapping[str, Any]] = {}
    # Of repositories that ship Python code for theirs; else tokenizer_config.json names it.
    tokenizer: ClassVar[type[PreTrainedTokenizerBase] | None] = None

    mask_token_id: int | None = None
    # `_name_or_path` as the checkpoint's author saved it
    source_name: str | None = None
    # Whether `--dtype` is `auto`; None if vLLM's own choice stays (`engine/auto_dtype.py`).
    dtype_left_open: bool | None = None

    @property
    def sparse_layers(self) -> frozenset[int]:
        """Return the layers with experts; the others have one dense MLP."""
        return frozenset()

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_variants(self.label, {**kwargs, **vars(self)}, self.fixed)
        # transformers replaces `_name_or_path` by the path that was opened.
        self.source_name = self.source_name or kwargs.get("_name_or_path")
        super().__post_init__(**kwargs)


class OfQwen2(DiffusionConfig, Qwen2Config):
    """Read the keys of a Qwen2."""

    fixed = {
        "hidden_act": "silu",
        "use_mrope": False,
        "use_sliding_window": False,
    }
    default_theta = 1000000.0


class OfQwen3(DiffusionConfig, Qwen3Config):
    """Read the keys of a Qwen3."""

    fixed = {**OfQwen2.fixed, "attention_bias": False}
    default_theta = 1000000.0


class OfLlama(DiffusionConfig, LlamaConfig):
    """Read the keys of a Llama."""

    fixed = {
        "attention_bias": False,
        "hidden_act": "silu",
        "mlp_bias": False,
    }
