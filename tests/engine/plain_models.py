"""Plain-torch forward of the block-causal checkpoints: SDAR, LLaDA2 and Fast-dLLM v2.

Like :mod:`plain`, on which it stands: no cache, no batching, nothing shared with the plugin. A
model's own names and layouts are brought to Qwen's when it is read.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plain import PlainModel, Slots, rotate
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

FAST_DLLM, LLADA2, SDAR = "Fast_dLLM_Qwen", "llada2_moe", ("sdar", "sdar_moe")
MASKS = {FAST_DLLM: "|<MASK>|", LLADA2: "<|mask|>"} | dict.fromkeys(SDAR, "<|MASK|>")


@dataclass(frozen=True)
class Router:
    """How a mixture chooses experts; `bias_E` of a layer is in the weights."""

    chosen: int
    groups: int = 1
    kept_groups: int = 1
    sigmoid: bool = False
    scale: float = 1.0

    def shares(self, logits_NE: Tensor, bias_E: Tensor) -> Tensor:
        """Share of every expert in the output ``[N, E]``, zero where it is not chosen."""
        scores = logits_NE.sigmoid() if self.sigmoid else logits_NE.softmax(-1)
        ranked = scores + bias_E
        if self.groups > 1:
            by_group = ranked.unflatten(-1, (self.groups, -1))
            best = by_group.topk(2).values.sum(-1).topk(self.kept_groups).indices
            kept = torch.zeros(by_group.shape[:2], dtype=torch.bool).scatter(-1, best, True)
            ranked = by_group.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        chosen = ranked.topk(self.chosen).indices
        shares = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        return shares / shares.sum(-1, keepdim=True) * self.scale


@dataclass(frozen=True)
class BlockModel(PlainModel):
    """A tiny SDAR, LLaDA2 or Fast-dLLM v2 in float32; `rows` and `predictions` as its parent."""

    rotary_dim: int = 0
    router: Router | None = None

    @classmethod
    def load(cls, folder: Path) -> "BlockModel":
        """Read config.json, tokenizer_config.json and model.safetensors."""
        config = json.loads((folder / "config.json").read_text())
        added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        kind = config["model_type"]
        weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        if kind == LLADA2:
            weights = _as_qwen(weights, config)
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return cls(
            weights,
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            eps=config["rms_norm_eps"],
            theta=config["rope_theta"],
            shift=kind == FAST_DLLM,
            mask_id=next(int(n) for n, t in added.items() if t["content"] == MASKS[kind]),
            rotary_dim=int(head * config.get("partial_rotary_factor", 1.0)),
            router=_router(config),
        )

    def _heads(self, x: Tensor, name: str, start: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").view(len(x), heads, -1).transpose(0, 1)
            for part, heads in (
                ("q", self.num_heads),
                ("k", self.num_kv_heads),
                ("v", self.num_kv_heads),
            )
        )
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        half = self.rotary_dim // 2
        frequency = self.theta ** (-torch.arange(half) / half)
        angle = torch.arange(start, start + len(x))[:, None] * frequency
        q, k = (
            torch.cat(
                [
                    rotate(part[..., : self.rotary_dim], angle.cos(), angle.sin()),
                    part[..., self.rotary_dim :],
                ],
                dim=-1,
            )
            for part in (q, k)
        )
        return q, k, v

    def _attend(
        self, x: Tensor, name: str, visible: Tensor, start: int = 0, slots: Slots | None = None
    ) -> Tensor:
        q, k, v = self._heads(x, name, start)
        if slots is not None:
            kept = slots.setdefault(name, (k, v))
            for old, new in zip(kept, (k, v), strict=True):
                old[:, start : start + len(x)] = new
            k, v = kept
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~visible, float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        return self._linear(out, f"{name}.o_proj")

    def _gated(self, x: Tensor, name: str) -> Tensor:
        inner = silu(self._linear(x, f"{name}.gate_proj")) * self._linear(x, f"{name}.up_proj")
        return self._linear(inner, f"{name}.down_proj")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        if self.router is None or f"{name}.gate.weight" not in self.weights:
            return self._gated(x, name)
        bias_E = self.weights.get(f"{name}.gate.expert_bias", torch.zeros(1))
        shares = self.router.shares(self._linear(x, f"{name}.gate"), bias_E)
        out = torch.zeros_like(x)
        for expert, share in enumerate(shares.T):
            out += share[:, None] * self._gated(x, f"{name}.experts.{expert}")
        if f"{name}.shared_experts.gate_proj.weight" in self.weights:
            out += self._gated(x, f"{name}.shared_experts")
        return out


def _router(config: dict[str, Any]) -> Router | None:
    if "num_experts" not in config:
        return None
    if config["model_type"] != LLADA2:
        return Router(config["num_experts_per_tok"])
    return Router(
        config["num_experts_per_tok"],
        config["n_group"],
        config["topk_group"],
        sigmoid=True,
        scale=config["routed_scaling_factor"],
    )


def _as_qwen(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """LLaDA2's tensors under Qwen's names, query, key and value apart."""
    head = config["head_dim"]
    heads = (config["num_attention_heads"], *[config["num_key_value_heads"]] * 2)
    named = {}
    for name, weight in weights.items():
        name = name.replace("word_embeddings", "embed_tokens").replace(".attention.", ".self_attn.")
        name = name.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm")
        name = name.replace("self_attn.dense", "self_attn.o_proj")
        if "query_key_value" in name:
            for part, rows in zip("qkv", weight.split([head * n for n in heads]), strict=True):
                named[name.replace("query_key_value", f"{part}_proj")] = rows
        else:
            named[name] = weight
    return named
