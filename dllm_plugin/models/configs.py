"""Define Hugging Face configs under the names that vLLM reads, at module level for pickle."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig, Qwen2Tokenizer
from transformers.models.ministral3.configuration_ministral3 import Ministral3Config

from .checkpoints.unserved import with_architecture
from .config_bases import DiffusionConfig, OfLlama, OfQwen2, OfQwen3, refuse_variants
from .mixture_configs import MIXTURES, LLaDAMoEConfig


class LLaDAConfig(DiffusionConfig):
    """Read LLaDA's OLMo-style keys under Llama's names; defaults are LLaDA-8B's."""

    model_type = "llada"
    label = "LLaDA"
    fixed = {
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
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the keys; LLaDA-MoE's published config.json names LLaDA's model type."""
        if LLaDAMoEConfig.architecture not in (config_dict.get("architectures") or ()):
            return super().from_dict(config_dict, **kwargs)
        return LLaDAMoEConfig.from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
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
        super().__post_init__(**kwargs)


class DreamTokenizer(Qwen2Tokenizer):
    """Provide Qwen2's byte-level BPE under the class name in Dream's tokenizer_config.json.

    The repositories have only vocab.json and merges.txt. The added tokens (`<|beginoftext|>`,
    `<|mask|>`), and which of them are special, come from tokenizer_config.json.
    """


class DreamConfig(OfQwen2):
    """Read Dream and DiffuCoder: Qwen2's keys and a mask token."""

    model_type = "Dream"
    label = "Dream"
    tokenizer = DreamTokenizer

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read config.json; its architecture tells DreamReasoner from Dream."""
        if "DreamForCausalLM" in (config_dict.get("architectures") or ()):
            # Null means what an absent key means.
            read = {k: v for k, v in config_dict.items() if v is not None}
            return DreamReasonerConfig.from_dict(read, **kwargs)
        return super().from_dict(config_dict, **kwargs)


class DreamReasonerConfig(OfQwen3):
    """Read DreamReasoner: Dream's model type, Qwen3's keys and the length of a block."""

    model_type = "Dream"
    label = "DreamReasoner"

    block_size: int | None = None


class OpenDCoderConfig(OfQwen2):
    """Read Open-dCoder: Qwen2's model type and keys."""

    model_type = "qwen2"
    label = "Open-dCoder"


class FastDLLMConfig(OfQwen2):
    """Read Fast-dLLM v2: Qwen2's keys and the length of a block."""

    model_type = "Fast_dLLM_Qwen"
    label = "Fast-dLLM v2"
    tokenizer = Qwen2Tokenizer

    bd_size: int | None = None


class SDARConfig(OfQwen3):
    """Read SDAR and I-DLM: Qwen3's keys and, in some repositories, mask token and block length."""

    model_type = "sdar"
    label = "SDAR"
    tokenizer = Qwen2Tokenizer

    block_size: int | None = None
    use_regular_causal: bool | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read config.json; I-DLM gets an architecture of its own."""
        return super().from_dict(with_architecture(config_dict), **kwargs)


class StableDiffCoderConfig(OfLlama):
    """Read Stable-DiffCoder: Llama's keys; only its authors' code knows the mask token."""

    model_type = "llama"
    label = "Stable-DiffCoder"

    mask_token_id: int | None = 5


class A2DQwen3Config(OfQwen3):
    """Read A2D from Qwen3."""

    model_type = "a2d-qwen3"
    label = "A2D"


class A2DQwen2Config(OfQwen2):
    """Read A2D from Qwen2."""

    model_type = "a2d-qwen2"
    label = "A2D"


class A2DLlamaConfig(OfLlama):
    """Read A2D from Llama."""

    model_type = "a2d-llama"
    label = "A2D"


class NemotronConfig(DiffusionConfig, Ministral3Config):
    """Read Nemotron-Labs-Diffusion: Ministral's keys, mask token and length of a block."""

    model_type = "nemotron_labs_diffusion"
    label = "Nemotron-Labs-Diffusion"
    fixed = {**OfLlama.fixed, "dlm_paradigm": "bidirectional", "sliding_window": None}

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


CONFIGS = (
    LLaDAConfig,
    DreamConfig,
    FastDLLMConfig,
    SDARConfig,
    A2DQwen3Config,
    A2DQwen2Config,
    A2DLlamaConfig,
    NemotronConfig,
    WeDLMConfig,
    *MIXTURES,
)
# Architectures whose model type belongs to transformers itself, which reads their config.json.
ADOPTED: dict[str, type[DiffusionConfig]] = {
    "StableDiffcoderForCausalLM": StableDiffCoderConfig,
    "OpenDCoderForDiffusionLM": OpenDCoderConfig,
}


def adopt(config: PreTrainedConfig) -> None:
    """Give a config our class if its architecture is adopted; ValueError for other variants."""
    for architecture in config.architectures or ():
        ours = ADOPTED.get(architecture)
        if ours is not None and not isinstance(config, ours):
            refuse_variants(ours.label, vars(config), ours.fixed)
            config.__class__ = ours
