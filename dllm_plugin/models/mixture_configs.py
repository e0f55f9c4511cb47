"""Define Hugging Face configs of mixtures of experts, at module level for pickle."""

from typing import Any, ClassVar

from transformers import Qwen2Tokenizer, Qwen3MoeConfig

from .checkpoints.unserved import LLADA22
from .config_bases import DiffusionConfig, OfQwen3


class OfQwen3Moe(DiffusionConfig, Qwen3MoeConfig):
    """Read the keys of a Qwen3-MoE."""

    fixed = OfQwen3.fixed
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


class SDARMoeConfig(OfQwen3Moe):
    """Read SDAR with experts: Qwen3-MoE's keys, otherwise like the dense model."""

    model_type = "sdar_moe"
    label = "SDAR"
    tokenizer = Qwen2Tokenizer

    block_size: int | None = None


class LLaDAMoEConfig(OfQwen3Moe):
    """Read LLaDA-MoE's keys under Qwen3-MoE's names; defaults are LLaDA-MoE-7B-A1B's."""

    model_type = "lladamoe"
    label = "LLaDA-MoE"
    architecture: ClassVar[str] = "LLaDAMoEModelLM"
    fixed = {
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
    """Read RND1: Qwen3-MoE's keys, and its authors' pad and EOS if the file has none."""

    model_type = "rnd1"
    label = "RND1"
    tokenizer = Qwen2Tokenizer
    fixed = {**OfQwen3.fixed, "is_causal": False}

    num_diffusion_steps: int | None = None
    pad_token_id: int | None = 151643
    eos_token_id: int | list[int] | None = 151645

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "RND1Config":
        """Read the keys; some are published as false, but transformers takes a null."""
        unset = ("rope_scaling", "sliding_window")
        read = {k: v for k, v in config_dict.items() if v or k not in unset}
        return super().from_dict(read, **kwargs)


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


class LLaDA2Config(DiffusionConfig):
    """Read LLaDA2: Ling 2.0's keys and LLaDA2.2's; defaults are LLaDA2-mini's."""

    model_type = "llada2_moe"
    label = "LLaDA2"
    fixed = {
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
    default_theta = 600000.0

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 0.5
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    embedding_dropout: float = 0.0
    moe_intermediate_size: int = 512
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    expert_capacity: int = 0
    block_size: int | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None

    @property
    def sparse_layers(self) -> frozenset[int]:
        return frozenset(range(self.first_k_dense_replace, self.num_hidden_layers))

    def __post_init__(self, **kwargs: Any) -> None:
        # The published window of 4096 was not used in training, but vLLM would apply it.
        self.sliding_window = None
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        for key, value in self.fixed.items():
            # vLLM's model reads them; its own defaults for absent keys are Ling 1's.
            setattr(self, key, value)
        if shares_experts(self):
            self.architectures = [LLADA22[0]]


class LLaDA2VeomniConfig(LLaDA2Config):
    """Read the model type that dFactory, the authors' training code, writes."""

    model_type = "llada2_moe_veomni"


class LLaDA21Config(LLaDA2Config):
    """Read the model type of a repackaged LLaDA2.1."""

    model_type = "llada21_moe"


MIXTURES = (
    SDARMoeConfig,
    LLaDAMoEConfig,
    RND1Config,
    LLaDA2Config,
    LLaDA2VeomniConfig,
    LLaDA21Config,
)
