"""List the shapes of published models: configs for dummy weights, and the sizes of their GEMMs."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dllm_plugin.decoding.families import FAMILIES

Config = dict[str, Any]


# By name, as the models' own config.json files; `tiny` is for tests, seconds on a CPU.
SHAPES: dict[str, Config] = json.loads(
    (Path(__file__).parent / "shapes.json").read_text(encoding="utf-8")
)
# Diffusion model type -> the autoregressive model of the same architecture.
AUTOREGRESSIVE = {
    "llada": ("LlamaForCausalLM", "llama"),
    "Dream": ("Qwen2ForCausalLM", "qwen2"),
    "sdar": ("Qwen3ForCausalLM", "qwen3"),
    "a2d-qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "llama": ("LlamaForCausalLM", "llama"),
    "nemotron_labs_diffusion": ("LlamaForCausalLM", "llama"),
    "wedlm": ("Qwen3ForCausalLM", "qwen3"),
}

W4A16 = "w4a16"  # as a quantisation: weights of 4 bits as they are stored, none of vLLM's names
GROUP = 128  # inputs that share a scale then


@dataclass(frozen=True)
class Sizes:
    """List the sizes that decide the work of a forward; `experts` is 0 for dense models."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocab: int
    context: int
    dense_layers: int
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_experts: int = 0

    @classmethod
    def of(cls, config: Config) -> "Sizes":
        """Read the sizes under LLaDA's or the usual names of config.json."""

        def get(*names: str, default: int | None = None) -> int:
            found = [config[name] for name in names if config.get(name) is not None]
            return int(found[0] if found or default is None else default)

        width = get("hidden_size", "d_model")
        heads = get("num_attention_heads", "n_heads")
        layers = get("num_hidden_layers", "n_layers")
        experts = get("num_experts", default=0)
        return cls(
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=get("num_key_value_heads", "n_kv_heads", default=heads),
            head=get("head_dim", default=width // heads),
            inner=get(
                "intermediate_size", "mlp_hidden_size", "dense_intermediate_size"
            ),
            vocab=get("embedding_size", "vocab_size"),
            context=get("max_position_embeddings", "max_sequence_length"),
            dense_layers=get("first_k_dense_replace", default=0) if experts else layers,
            experts=experts,
            experts_per_token=get("num_experts_per_tok", default=0),
            expert_inner=get(
                "moe_intermediate_size", "expert_intermediate_size", default=0
            ),
            shared_experts=get("num_shared_experts", default=0),
        )

    def per_rank(self, ranks: int) -> "Sizes":
        """Return the sizes of one rank under tensor parallelism."""
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            inner=self.inner // ranks,
            vocab=-(-self.vocab // ranks),
            expert_inner=self.expert_inner // ranks,
        )

    @property
    def attention_gemms(self) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of the merged QKV projection and of the output projection."""
        q_width = self.heads * self.head
        return [
            (q_width + 2 * self.kv_heads * self.head, self.width),
            (self.width, q_width),
        ]

    def mlp_gemms(self, inner: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of the merged gate and up projection and of the down one."""
        return [(2 * inner, self.width), (self.width, inner)]

    def kv_bytes(self, positions: int, item: float) -> float:
        """Return the bytes of keys and values of `positions` positions in all layers."""
        return 2 * self.layers * self.kv_heads * self.head * positions * item


def autoregressive_config(config: Config) -> Config:
    """Return the config of an autoregressive model with the same sizes.

    Raises ValueError if there is none.
    """
    kind = config["model_type"]
    if kind not in AUTOREGRESSIVE:
        raise ValueError(
            f"--vs ar knows no autoregressive model of the shapes of {kind!r}: leave it out."
        )
    architecture, model_type = AUTOREGRESSIVE[kind]
    sizes = Sizes.of(config)
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get(
        "rope_theta"
    )
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head,
        "intermediate_size": sizes.inner,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.context,
        "rope_theta": theta or 10000.0,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": config.get("eos_token_id"),
    }


def stored_in_4_bits(config: Config) -> Config:
    """Return the config of a checkpoint whose layers, but not the LM head, have 4 bits."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": min(GROUP, Sizes.of(config).width),
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "model.transformer.ff_out"],
    }
    return config | {"quantization_config": quantization}


def schedule_of(config: Config, strategy: str) -> str:
    """Return the policy that unmasks as many positions in every step; RND1 has `entropy`."""
    from dllm_plugin.decoding.methods import METHODS

    family = FAMILIES.get(config["architectures"][0])
    method = METHODS.get((strategy, family.name)) if family else None
    if method is None or "low_confidence" in method.policies:
        return "low_confidence"
    return method.default_policy


def canvas_of(config: Config) -> tuple[int, ...]:
    """Return the canvas of two blocks of a model whose blocks share experts; else none."""
    return (2 * config["block_size"],) if config.get("expert_capacity") else ()


def write_config(config: Config, folder: Path) -> str:
    """Write a model folder that holds only `config`; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)
