"""Define Hugging Face configs under the names that vLLM reads, at module level for pickle."""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama.configuration_llama import LlamaConfig

from dllm_plugin.models.checkpoints.unserved import with_architecture
from dllm_plugin.models.variants import (
    LLADA2_FIXED,
    LLADA_FIXED,
    LLADA_MOE_FIXED,
    LLAMA_FIXED,
    QWEN_FIXED,
    SDAR_FIXED,
    refuse_variants,
    shares_experts,
)


class DiffusionConfig(PreTrainedConfig):
    """Check a config and add what all our configs have; comes before the parent's class.

    Raises ValueError for variants of the architecture that we do not serve.
    """

    label: ClassVar[str] = ""
    fixed: ClassVar[Mapping[str, Any]] = {}

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


class LLaDAConfig(DiffusionConfig):
    """Read LLaDA's OLMo-style keys under Llama's names; defaults are LLaDA-8B's."""

    model_type = "llada"
    label = "LLaDA"
    fixed = LLADA_FIXED
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


class OfQwen2(DiffusionConfig, Qwen2Config):
    """Read the keys of a Qwen2."""

    fixed = QWEN_FIXED
    default_theta = 1000000.0


class OfQwen3(DiffusionConfig, Qwen3Config):
    """Read the keys of a Qwen3."""

    fixed = SDAR_FIXED
    default_theta = 1000000.0


class OfQwen3Moe(DiffusionConfig, Qwen3MoeConfig):
    """Read the keys of a Qwen3-MoE."""

    fixed = SDAR_FIXED
    default_theta = 1000000.0

    # The parent has none, and hidden size / heads would be wrong.
    head_dim: int | None = 128
    norm_topk_prob: bool = True

    @property
    def sparse_layers(self) -> frozenset[int]:
        """Return the layers with experts; the others have one dense MLP."""
        step, dense = self.decoder_sparse_step, self.mlp_only_layers or ()
        return frozenset(
            layer
            for layer in range(self.num_hidden_layers)
            if layer not in dense and (layer + 1) % step == 0
        )


class DreamConfig(OfQwen2):
    """Read Dream and DiffuCoder: Qwen2's keys and a mask token."""

    model_type = "Dream"
    label = "Dream"

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

    bd_size: int | None = None


class SDARConfig(DiffusionConfig, Qwen3Config):
    """Read SDAR and I-DLM: Qwen3's keys and, in some repositories, mask token and block length."""

    model_type = "sdar"
    label = "SDAR"
    fixed = SDAR_FIXED
    default_theta = 1000000.0

    block_size: int | None = None
    use_regular_causal: bool | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read config.json; I-DLM gets an architecture of its own."""
        return super().from_dict(with_architecture(config_dict), **kwargs)


class OfLlama(DiffusionConfig, LlamaConfig):
    """Read the keys of a Llama."""

    fixed = LLAMA_FIXED


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


class SDARMoeConfig(OfQwen3Moe):
    """Read SDAR with experts: Qwen3-MoE's keys, otherwise like the dense model."""

    model_type = "sdar_moe"
    label = "SDAR"

    block_size: int | None = None


class LLaDAMoEConfig(OfQwen3Moe):
    """Read LLaDA-MoE's keys under Qwen3-MoE's names; defaults are LLaDA-MoE-7B-A1B's."""

    model_type = "lladamoe"
    label = "LLaDA-MoE"
    architecture: ClassVar[str] = "LLaDAMoEModelLM"
    fixed = LLADA_MOE_FIXED
    default_theta = 50000.0

    vocab_size: int = 157184
    hidden_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int | None = None
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    expert_intermediate_size: int = 1024
    dense_intermediate_size: int | None = None
    moe_layer_freq: list[int] | None = None
    mlp_only_layers: list[int] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "LLaDAMoEConfig":
        """Read the keys; the authors' code never normalises the shares of chosen experts."""
        fixed = {"norm_topk_prob": False, "model_type": cls.model_type}
        return super().from_dict(config_dict | fixed, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        if 0 in (self.moe_layer_freq or ()):
            raise ValueError(
                f"This LLaDA-MoE checkpoint has moe_layer_freq={self.moe_layer_freq!r} in "
                "config.json; only layers with experts are supported."
            )
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.moe_intermediate_size = self.expert_intermediate_size
        super().__post_init__(**kwargs)
        # vLLM's layer reads the key and takes no null.
        self.shared_expert_intermediate_size = 0


class RND1Config(OfQwen3Moe):
    """Read RND1: Qwen3-MoE's keys, and its authors' pad and EOS where the file has none."""

    model_type = "rnd1"
    label = "RND1"
    fixed = SDAR_FIXED | {"is_causal": False}

    num_diffusion_steps: int | None = None
    pad_token_id: int | None = 151643
    eos_token_id: int | list[int] | None = 151645

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "RND1Config":
        """Read the keys; some are published as false where transformers takes a null."""
        unset = ("rope_scaling", "sliding_window")
        read = {k: v for k, v in config_dict.items() if v or k not in unset}
        return super().from_dict(read, **kwargs)


class LLaDA2Config(DiffusionConfig):
    """Read LLaDA2: Ling 2.0's keys and LLaDA2.2's; defaults are LLaDA2-mini's."""

    model_type = "llada2_moe"
    label = "LLaDA2"
    fixed = LLADA2_FIXED
    default_theta = 600000.0

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 0.5
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    embedding_dropout: float = 0.0
    # vLLM's model reads these; its own defaults for absent keys are Ling 1's.
    use_bias: bool = False
    use_qkv_bias: bool = False
    use_qk_norm: bool = True
    use_rmsnorm: bool = True
    moe_intermediate_size: int = 512
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    router_dtype: str = "fp32"
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    expert_capacity: int = 0
    block_size: int | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # The published window of 4096 was not used in training, but vLLM would apply it.
        self.sliding_window = self.sliding_window if self.use_sliding_window else None
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        if shares_experts(self):
            self.architectures = ["LLaDA22MoeModelLM"]


class LLaDA2VeomniConfig(LLaDA2Config):
    """Read the model type that dFactory, the authors' training code, writes."""

    model_type = "llada2_moe_veomni"


class LLaDA21Config(LLaDA2Config):
    """Read the model type of a repackaged LLaDA2.1."""

    model_type = "llada21_moe"


CONFIGS = (
    LLaDAConfig,
    LLaDAMoEConfig,
    DreamConfig,
    FastDLLMConfig,
    SDARConfig,
    SDARMoeConfig,
    RND1Config,
    LLaDA2Config,
    LLaDA2VeomniConfig,
    LLaDA21Config,
    A2DQwen3Config,
    A2DQwen2Config,
    A2DLlamaConfig,
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
