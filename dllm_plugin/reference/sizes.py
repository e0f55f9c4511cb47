"""Read config.json: the sizes of every family under one set of names, and its tensors' shapes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAST_DLLM, DREAM, LLADA = "Fast_dLLM_Qwen", "Dream", "llada"
LLADA_MOE, RND1, IDLM = "lladamoe", "rnd1", "idlm"
WEDLM, WEDLM_BIASED = "wedlm", "wedlm with bias"
LLADA2, SDAR = ("llada2_moe", "llada2_moe_veomni", "llada21_moe"), ("sdar", "sdar_moe")
NEMOTRON = "nemotron_labs_diffusion"
STABLE_DIFFCODER = "stable_diffcoder"
A2D_QWEN3, A2D_QWEN2, A2D_LLAMA = A2D = ("a2d-qwen3", "a2d-qwen2", "a2d-llama")
# Architectures whose model type is that of other models.
KINDS = {
    "StableDiffcoderForCausalLM": STABLE_DIFFCODER,
    "LLaDAMoEModelLM": LLADA_MOE,
}
MASKS = (
    {FAST_DLLM: "|<MASK>|", STABLE_DIFFCODER: "<[MASK_TOKEN]>"}
    | dict.fromkeys((*LLADA2, *A2D, LLADA_MOE), "<|mask|>")
    | dict.fromkeys((*SDAR, IDLM), "<|MASK|>")
)
SHIFTED = (DREAM, FAST_DLLM, RND1, IDLM)
BIASED = (DREAM, FAST_DLLM, A2D_QWEN2, WEDLM_BIASED)
NORMED = (*SDAR, *LLADA2, A2D_QWEN3, LLADA_MOE, RND1, IDLM, WEDLM)
THETAS = {LLADA: 5e5, LLADA_MOE: 5e4} | dict.fromkeys(LLADA2, 6e5)


@dataclass(frozen=True)
class Sizes:
    """Hold what config.json says, under one set of names."""

    kind: str
    width: int
    inner: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    eps: float
    theta: float
    rotary_dim: int
    tied: bool
    raw: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> "Sizes":
        """Read config.json. Raises ValueError for what the plain model does not compute."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = config["model_type"]
        for architecture in config.get("architectures") or ():
            kind = KINDS.get(architecture, kind)
        # I-DLM has SDAR's names, and this much of its own.
        if kind in SDAR and 1 in (
            config.get("block_size"),
            config.get("use_regular_causal"),
        ):
            kind = IDLM
        if kind == WEDLM and not config["qk_norm"]:
            kind = WEDLM_BIASED
        known = (
            *(LLADA, LLADA_MOE, DREAM, FAST_DLLM, RND1, IDLM, WEDLM, WEDLM_BIASED),
            *(*SDAR, *LLADA2, STABLE_DIFFCODER, *A2D, NEMOTRON),
        )
        if kind not in known:
            raise ValueError(
                f"model_type {kind!r} has no plain model; known: {', '.join(known)}."
            )
        for name in ("quantization_config", "rope_scaling"):
            if config.get(name):
                raise ValueError(
                    f"{name} in config.json is nothing that the plain model computes."
                )
        if kind == LLADA:
            return cls(*_llada_sizes(config))
        heads, width = config["num_attention_heads"], config["hidden_size"]
        head = config.get("head_dim") or (
            128 if kind in ("sdar_moe", RND1) else width // heads
        )
        share = config.get("partial_rotary_factor", 0.5 if kind in LLADA2 else 1.0)
        return cls(
            kind,
            width,
            config.get("intermediate_size") or config["dense_intermediate_size"],
            config["vocab_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            head,
            config.get("rms_norm_eps", 1e-6),
            _theta(config, THETAS.get(kind, 1e6)),
            int(head * share),
            bool(config.get("tie_word_embeddings")),
            config,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor that is needed, by Qwen's names."""
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.width),
            "model.norm.weight": (self.width,),
            "lm_head.weight": (self.vocab, self.width),
        }
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{layer}.{name}.weight"] = (self.width,)
            found |= self._attention(f"{layer}.self_attn") | self._mlp(
                f"{layer}.mlp", i
            )
        return found

    def _attention(self, name: str) -> dict[str, tuple[int, ...]]:
        rows = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        found: dict[str, tuple[int, ...]] = {
            f"{name}.o_proj.weight": (self.width, self.heads * self.head)
        }
        for part, heads in rows.items():
            found[f"{name}.{part}_proj.weight"] = (heads * self.head, self.width)
            if self.kind in BIASED:
                found[f"{name}.{part}_proj.bias"] = (heads * self.head,)
        if self.kind in NORMED:
            found |= {f"{name}.{part}_norm.weight": (self.head,) for part in "qk"}
        return found

    def _mlp(self, name: str, layer: int) -> dict[str, tuple[int, ...]]:
        config, experts = self.raw, self.raw.get("num_experts", 0)
        step, dense = (
            config.get("decoder_sparse_step", 1),
            config.get("mlp_only_layers") or (),
        )
        is_dense = layer < config.get("first_k_dense_replace", 0) or layer in dense
        if not experts or is_dense or (layer + 1) % step:
            return self._gated(name, self.inner)
        inner = config.get("expert_intermediate_size")
        inner = inner or config["moe_intermediate_size"]
        found: dict[str, tuple[int, ...]] = {
            f"{name}.gate.weight": (experts, self.width)
        }
        for expert in range(experts):
            found |= self._gated(f"{name}.experts.{expert}", inner)
        if self.kind in LLADA2:
            found[f"{name}.gate.expert_bias"] = (experts,)
            if shared := config.get("num_shared_experts", 1):
                found |= self._gated(f"{name}.shared_experts", inner * shared)
        return found

    def _gated(self, name: str, inner: int) -> dict[str, tuple[int, ...]]:
        up, down = (inner, self.width), (self.width, inner)
        parts = {"gate_proj": up, "up_proj": up, "down_proj": down}
        return {f"{name}.{part}.weight": shape for part, shape in parts.items()}


def _llada_sizes(config: dict[str, Any]) -> tuple[Any, ...]:
    width, heads = config["d_model"], config["n_heads"]
    head = width // heads
    return (
        *(LLADA, width),
        config.get("mlp_hidden_size") or int(config.get("mlp_ratio", 4) * width),
        config.get("embedding_size") or config["vocab_size"],
        *(config["n_layers"], heads, config.get("n_kv_heads") or heads, head),
        *(config.get("rms_norm_eps", 1e-5), _theta(config, THETAS[LLADA]), head),
        bool(config.get("weight_tying")),
        config,
    )


def _theta(config: dict[str, Any], default: float) -> float:
    # Newer releases of transformers write it into a dictionary of its own.
    return float(
        config.get("rope_theta")
        or (config.get("rope_parameters") or {}).get("rope_theta", default)
    )
