"""Plain-torch forward of the tiny checkpoints, with an explicit block mask, and sampling rules.

No cache, no batching, nothing shared with the plugin: what the engine has to agree with. The
decode loops on top of it are in :mod:`plain_loops`.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

WIDE = 2**64 - 1
Slots = dict[str, tuple[Tensor, Tensor]]  # K and V of each layer, by position

# LLaDA's names in the order of Dream's.
LLADA_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


@dataclass(frozen=True)
class PlainModel:
    """A tiny LLaDA or Dream in float32."""

    weights: dict[str, Tensor]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    eps: float
    theta: float
    shift: bool
    mask_id: int

    @classmethod
    def load(cls, folder: Path) -> "PlainModel":
        """Read config.json and model.safetensors."""
        config = json.loads((folder / "config.json").read_text())
        weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        is_llada = config["model_type"] == "llada"
        names = ("n_layers", "n_heads", "n_kv_heads") if is_llada else (
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        )  # fmt: skip
        return cls(
            _as_dream(weights, config["n_layers"]) if is_llada else weights,
            *(config[name] for name in names),
            eps=config["rms_norm_eps"],
            theta=config["rope_theta"],
            shift=not is_llada,
            mask_id=config["mask_token_id"],
        )

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _attend(
        self, x: Tensor, name: str, visible: Tensor, start: int = 0, slots: Slots | None = None
    ) -> Tensor:
        tokens = x.shape[0]
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").view(tokens, heads, -1).transpose(0, 1)
            for part, heads in zip(
                "qkv", (self.num_heads, self.num_kv_heads, self.num_kv_heads), strict=True
            )
        )
        half = q.shape[-1] // 2
        frequency = self.theta ** (-torch.arange(half) / half)
        angle = torch.arange(start, start + tokens)[:, None] * frequency
        q, k = (rotate(part, angle.cos(), angle.sin()) for part in (q, k))
        if slots is not None:
            kept = slots.setdefault(name, (k, v))
            for old, new in zip(kept, (k, v), strict=True):
                old[:, start : start + tokens] = new
            k, v = kept
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = (q @ k.transpose(1, 2)) / math.sqrt(2 * half)
        scores = scores.masked_fill(~visible, float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, -1)
        return self._linear(out, f"{name}.o_proj")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate = silu(self._linear(x, f"{name}.gate_proj"))
        return self._linear(gate * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def rows(self, tokens: list[int], block: list[int]) -> Tensor:
        """Logits ``[N, V]``; the query at i sees the key at j if ``block[i] >= block[j]``."""
        block_N = torch.tensor(block)
        return self._rows(tokens, block_N[:, None] >= block_N[None, :])

    def rows_at(self, start: int, tokens: list[int], slots: Slots) -> Tensor:
        """Logits ``[N, V]`` of tokens from `start` on, which see every slot.

        Each writes its own slot before anyone looks; the first call fills all of them.
        """
        return self._rows(tokens, torch.tensor(True), start, slots)

    @torch.no_grad()
    def _rows(
        self, tokens: list[int], visible: Tensor, start: int = 0, slots: Slots | None = None
    ) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][tokens]
        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            x = x + self._attend(
                self._norm(x, f"{layer}.input_layernorm"),
                f"{layer}.self_attn",
                visible,
                start,
                slots,
            )
            inner = self._norm(x, f"{layer}.post_attention_layernorm")
            x = x + self._mlp(inner, f"{layer}.mlp")
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def predictions(self, tokens: list[int], block: list[int]) -> Tensor:
        """Like `rows`, but row p predicts the token at position p."""
        rows = self.rows(tokens, block)
        return torch.cat([rows[:1], rows[:-1]]) if self.shift else rows


def _as_dream(weights: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    named = {
        "model.embed_tokens.weight": weights["model.transformer.wte.weight"],
        "model.norm.weight": weights["model.transformer.ln_f.weight"],
        "lm_head.weight": weights["model.transformer.ff_out.weight"],
    }
    for i in range(num_layers):
        for name, theirs in LLADA_LAYER.items():
            weight = weights[f"model.transformer.blocks.{i}.{theirs}.weight"]
            named[f"model.layers.{i}.{name}.weight"] = weight
    return named


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + half) of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def counter_uniform(seed: int, position: int, step: int) -> float:
    """Uniform number in (0, 1) of (seed, position, step), in Python integers."""
    golden, first = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
    state = _mix((seed + golden) & WIDE)
    state = _mix(state ^ (position * golden & WIDE))
    state = _mix(state ^ (step * first & WIDE))
    return ((state >> 40) + 0.5) * 2.0**-24


def counter_uniforms(seed: int, position: int, step: int, size: int) -> Tensor:
    """Uniform numbers in (0, 1) of (seed, position, step) and each token, float64."""
    golden, first, last = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    state = _mix((seed + golden) & WIDE)
    state = _mix(state ^ (position * golden & WIDE))
    state = _mix(state ^ (step * first & WIDE))
    bits = [_mix(state ^ (token * last & WIDE)) >> 12 for token in range(size)]
    return (torch.tensor(bits, dtype=torch.float64) + 0.5) * 2.0**-52


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WIDE
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WIDE
    return x ^ (x >> 31)


def llada_quota(num_masked: int, steps: int, step: int) -> int:
    """LLaDA ``get_num_transfer_tokens``: an even share, the remainder in the first steps."""
    if step >= steps:
        return num_masked
    return num_masked // steps + (step < num_masked % steps)


def dream_quota(num_left: int, steps: int, step: int, eps: float) -> int:
    """Dream ``_sample``: share of what is left; the last step takes everything."""
    if step >= steps - 1:
        return num_left
    time = torch.linspace(1, eps, steps + 1)
    return int(num_left * (1 - time[step + 1] / time[step]))


def factor_count(confidences: list[float], factor: float) -> int:
    """Fast-dLLM ``get_transfer_index_dynamic``: how many of the falling confidences are taken."""
    n = len(confidences)
    fails = (j for j in range(1, n) if confidences[j] < 1 - factor / (j + 2))
    count = next(fails, n - 1)
    return count + 1 if count in (0, n - 1) else count
