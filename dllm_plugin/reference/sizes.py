"""Read config.json: the sizes of every family under one set of names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAST_DLLM, DREAM, LLADA = "Fast_dLLM_Qwen", "Dream", "llada"
LLADA_MOE, RND1, IDLM = "lladamoe", "rnd1", "idlm"
WEDLM, WEDLM_BIASED = "wedlm", "wedlm with bias"
LLADA2 = ("llada2_moe", "llada2_moe_veomni", "llada21_moe")
SDAR = ("sdar", "sdar_moe")
NEMOTRON = "nemotron_labs_diffusion"
STABLE_DIFFCODER, DREAM_REASONER = "stable_diffcoder", "dream_reasoner"
A2D_QWEN3, A2D_QWEN2, A2D_LLAMA = A2D = ("a2d-qwen3", "a2d-qwen2", "a2d-llama")
# Architectures whose model type is that of other models.
KINDS = {
    "StableDiffcoderForCausalLM": STABLE_DIFFCODER,
    "LLaDAMoEModelLM": LLADA_MOE,
    "DreamForCausalLM": DREAM_REASONER,
}
MASKS = (
    {FAST_DLLM: "|<MASK>|", STABLE_DIFFCODER: "<[MASK_TOKEN]>"}
    | dict.fromkeys((*LLADA2, *A2D, LLADA_MOE, DREAM_REASONER), "<|mask|>")
    | dict.fromkeys((*SDAR, IDLM), "<|MASK|>")
)
SHIFTED = (DREAM, FAST_DLLM, RND1, IDLM)
THETAS = {LLADA: 5e5, LLADA_MOE: 5e4} | dict.fromkeys(LLADA2, 6e5)


KNOWN = (
    *(LLADA, LLADA_MOE, DREAM, FAST_DLLM, RND1, IDLM, WEDLM, WEDLM_BIASED),
    *(*SDAR, *LLADA2, STABLE_DIFFCODER, *A2D, NEMOTRON, DREAM_REASONER),
)
# LLaDA's keys under the names of all others.
LLADA_KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "weight_tying": "tie_word_embeddings",
}


@dataclass(frozen=True)
class Sizes:
    """Store the keys of config.json that a forward needs, under one set of names."""

    kind: str
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
        kind = _kind(config)
        if kind not in KNOWN:
            raise ValueError(
                f"model_type {kind!r} has no plain model; known: {', '.join(KNOWN)}."
            )
        for name in ("quantization_config", "rope_scaling"):
            if config.get(name):
                raise ValueError(
                    f"{name} in config.json is nothing that the plain model computes."
                )
        if kind == LLADA:
            for theirs, ours in LLADA_KEYS.items():
                config[ours] = config.get(theirs)
        heads = config["num_attention_heads"]
        head = config.get("head_dim")
        if not head:
            is_wide = kind in ("sdar_moe", RND1)
            head = 128 if is_wide else config["hidden_size"] // heads
        share = config.get("partial_rotary_factor", 0.5 if kind in LLADA2 else 1.0)
        theta = THETAS.get(kind, 1e6)
        # Newer releases of transformers write it into a dictionary of its own.
        theta = (config.get("rope_parameters") or {}).get("rope_theta", theta)
        return cls(
            kind,
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            head,
            config.get("rms_norm_eps", 1e-5 if kind == LLADA else 1e-6),
            float(config.get("rope_theta") or theta),
            int(head * share),
            bool(config.get("tie_word_embeddings")),
            config,
        )

    @property
    def yarn(self) -> dict[str, float] | None:
        """Return the numbers that stretch the angles of positions; None if nothing does."""
        return self.raw["rope_parameters"] if self.kind == NEMOTRON else None


def _kind(config: dict[str, Any]) -> str:
    """Return the name of a family, by its model type and what else tells it from others."""
    kind: str = config["model_type"]
    for architecture in config.get("architectures") or ():
        kind = KINDS.get(architecture, kind)
    # I-DLM has SDAR's names, and this much of its own.
    own = (config.get("block_size"), config.get("use_regular_causal"))
    if kind in SDAR and 1 in own:
        return IDLM
    if kind == WEDLM and not config["qk_norm"]:
        return WEDLM_BIASED
    return kind
