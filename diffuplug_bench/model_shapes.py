"""List the shapes of published models: configs for dummy weights, and the sizes of their GEMMs.

The sizes come from the models' own config.json files.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Config = dict[str, Any]


def _llada(
    width: int, layers: int, heads: int, inner: int, vocab: int, context: int
) -> Config:
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": width,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": heads,
        "mlp_hidden_size": inner,
        "vocab_size": vocab,
        "embedding_size": vocab,
        "max_sequence_length": context,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    }


SHAPES: dict[str, Config] = {
    "llada-8b": _llada(4096, 32, 32, 12288, 126464, 4096)
    | {"mask_token_id": 126336, "eos_token_id": 126081},
    "dream-7b": {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "mask_token_id": 151666,
        "eos_token_id": 151643,
    },
    "sdar-8b": {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "mask_token_id": 151669,
        "eos_token_id": 151643,
    },
    "llada2-mini": {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 4,
        "vocab_size": 157184,
        "max_position_embeddings": 32768,
        "rope_theta": 600000.0,
        "rms_norm_eps": 1e-6,
        "mask_token_id": 156895,
        "eos_token_id": 156892,
    },
    # For tests; takes seconds on a CPU.
    "tiny": _llada(64, 2, 2, 128, 512, 4096)
    | {"mask_token_id": 500, "eos_token_id": 501},
}
# Diffusion model type -> the autoregressive model of the same architecture.
AUTOREGRESSIVE = {
    "llada": ("LlamaForCausalLM", "llama"),
    "Dream": ("Qwen2ForCausalLM", "qwen2"),
    "sdar": ("Qwen3ForCausalLM", "qwen3"),
}


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
            inner=get("intermediate_size", "mlp_hidden_size"),
            vocab=get("embedding_size", "vocab_size"),
            context=get("max_position_embeddings", "max_sequence_length"),
            dense_layers=get("first_k_dense_replace", default=0) if experts else layers,
            experts=experts,
            experts_per_token=get("num_experts_per_tok", default=0),
            expert_inner=get("moe_intermediate_size", default=0),
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

    def kv_bytes(self, positions: int, item: int) -> int:
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


def write_config(config: Config, folder: Path) -> str:
    """Write a model folder that holds only `config`; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)
