"""Refuse model types that DiffuPlug knows by name only, when their config is read."""

from typing import Any

from transformers import PreTrainedConfig

from dllm_plugin.models.checkpoints.unserved import refuse_unserved


class UnservedConfig(PreTrainedConfig):
    """Refuse a model type that DiffuPlug knows by name only."""

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_unserved({"model_type": self.model_type})
        super().__post_init__(**kwargs)


class NemotronConfig(UnservedConfig):
    """Refuse Nemotron-Labs-Diffusion."""

    model_type = "nemotron_labs_diffusion"


class WeDLMConfig(UnservedConfig):
    """Refuse WeDLM."""

    model_type = "wedlm"


UNSERVED_CONFIGS = (NemotronConfig, WeDLMConfig)
