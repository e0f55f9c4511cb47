"""Define Hugging Face configs of models whose answers causal forwards store."""

from typing import Any

from transformers.models.ministral3.configuration_ministral3 import Ministral3Config

from dllm_plugin.models.configs import DiffusionConfig, SDARConfig
from dllm_plugin.models.variants import NEMOTRON_FIXED


class NemotronConfig(DiffusionConfig, Ministral3Config):
    """Read Nemotron-Labs-Diffusion: Ministral's keys, mask token and length of a block."""

    model_type = "nemotron_labs_diffusion"
    label = "Nemotron-Labs-Diffusion"
    fixed = NEMOTRON_FIXED

    block_size: int | None = None
    llama_4_scaling: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        rope = self.rope_parameters or {}
        beta = rope.get("llama_4_scaling_beta")
        if beta:
            # vLLM's model scales queries by this key.
            self.llama_4_scaling = {
                "beta": beta,
                "original_max_position_embeddings": rope[
                    "original_max_position_embeddings"
                ],
            }


class WeDLMConfig(SDARConfig):
    """Read WeDLM: Qwen3's keys; without norms of query and key, their biases are `qkv_bias`."""

    model_type = "wedlm"
    label = "WeDLM"

    mask_token_id: int | None = 151665
    qk_norm: bool = True
    qkv_bias: bool = False


CAUSAL_CONFIGS = (NemotronConfig, WeDLMConfig)
