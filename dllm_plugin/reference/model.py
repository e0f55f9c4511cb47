"""Compute the forward of every family in plain torch, with an explicit block mask.

No cache, no batching, nothing shared with the engine: what it has to agree with. A checkpoint's
own names and layouts are brought to Qwen's when it is read.
"""

import json
import math
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from .checkpoint import load_weights
from .sizes import LLADA2, LLADA_MOE, MASKS, SHIFTED, Sizes
from .text import Slots

BLOCK = 32  # of LLaDA2.2, whose routing shares experts between positions
States = tuple[list[Tensor], Tensor]  # after the embedding and each layer, and logits
Turns = tuple[Tensor, Tensor]  # cosine and sine of the angles, by position


@dataclass(frozen=True)
class Router:
    """Choose experts of a mixture; `bias_E` of a layer is in the weights."""

    chosen: int
    groups: int = 1
    kept_groups: int = 1
    sigmoid: bool = False
    normalised: bool = True
    scale: float = 1.0
    block: int | None = None  # positions that share a set of experts
    capacity: int = 0  # experts in that set

    @classmethod
    def of(cls, sizes: Sizes) -> "Router | None":
        """Read how a checkpoint chooses; None without experts."""
        config = sizes.raw
        if "num_experts" not in config:
            return None
        chosen = config["num_experts_per_tok"]
        if sizes.kind == LLADA_MOE:
            return cls(chosen, normalised=False)
        if sizes.kind not in LLADA2:
            return cls(chosen, normalised=config.get("norm_topk_prob", True))
        groups = config.get("n_group", 8)
        kept = config.get("topk_group", 4)
        scale = config.get("routed_scaling_factor", 2.5)
        if capacity := config.get("expert_capacity"):
            block = config.get("block_size") or BLOCK
            return cls(
                chosen, sigmoid=True, scale=scale, block=block, capacity=capacity
            )
        return cls(chosen, groups, kept, sigmoid=True, scale=scale)

    def shares(self, logits_NE: Tensor, bias_E: Tensor) -> Tensor:
        """Return the share of every expert in the output ``[N, E]``, zero if it is not chosen."""
        scores = logits_NE.sigmoid() if self.sigmoid else logits_NE.softmax(-1)
        ranked = scores + bias_E
        if self.block is not None:
            ranked = torch.cat([self._shared(r) for r in ranked.split(self.block)])
        if self.groups > 1:
            by_group = ranked.unflatten(-1, (self.groups, -1))
            best = by_group.topk(2).values.sum(-1).topk(self.kept_groups).indices
            kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(
                -1, best, True
            )
            ranked = by_group.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        chosen = ranked.topk(self.chosen).indices
        shares = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        return shares * self.scale

    def _shared(self, ranked_BE: Tensor) -> Tensor:
        """Return the ranking of one block, without experts outside its set."""
        best = ranked_BE.amax(0).topk(self.capacity).indices
        kept_E = torch.zeros_like(ranked_BE[0], dtype=torch.bool)
        kept_E[best] = True
        return ranked_BE.masked_fill(~kept_E, float("-inf"))


class InFloat32(UserDict[str, Tensor]):
    """Convert weights to float32, each when it is read."""

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name].float()


@dataclass(frozen=True)
class PlainModel:
    """Store a model of any family, and compute its forward."""

    weights: Mapping[str, Tensor]
    sizes: Sizes
    mask_id: int

    @classmethod
    def load(
        cls, folder: Path, mask_id: int | None = None, **reading: Any
    ) -> "PlainModel":
        """Read config.json and all weights; `reading` as `load_weights` takes it."""
        sizes = Sizes.load(folder)
        weights = load_weights(folder, sizes, **reading)
        if mask_id is None:
            mask_id = _mask_id(folder, sizes)
        return cls(weights, sizes, mask_id)

    @cached_property
    def router(self) -> Router | None:
        """Return how experts are chosen; None without experts."""
        return Router.of(self.sizes)

    @property
    def shift(self) -> bool:
        """Return whether row p predicts the token at position p + 1."""
        return self.sizes.kind in SHIFTED

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.weights["lm_head.weight"].device

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.sizes.eps)
        return (x * scale).to(x.dtype) * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(
            x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )

    def _turns(self, start: int, count: int) -> Turns:
        """Return cosine and sine ``[N, rotary / 2]`` of the angles of positions."""
        half, theta = self.sizes.rotary_dim // 2, self.sizes.theta
        frequency = 1.0 / theta ** (torch.arange(half, device=self.device) / half)
        if self.sizes.yarn is not None:
            frequency = stretched(frequency, theta, self.sizes.yarn)
        position = torch.arange(start, start + count, device=self.device)
        angle = position[:, None] * frequency
        return angle.cos(), angle.sin()

    def _heads(self, x: Tensor, name: str, turns: Turns) -> list[Tensor]:
        """Return query, key and value ``[heads, N, head]``, the first two rotated."""
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj")
            .view(len(x), -1, self.sizes.head)
            .transpose(0, 1)
            for part in "qkv"
        )
        if f"{name}.q_norm.weight" in self.weights:
            q = self._norm(q, f"{name}.q_norm")
            k = self._norm(k, f"{name}.k_norm")
        return [rotate(q, turns), rotate(k, turns), v]

    def _attend(
        self,
        x: Tensor,
        name: str,
        visible: Tensor | None,
        turns: Turns,
        start: int,
        slots: Slots | None,
    ) -> Tensor:
        q, k, v = self._heads(x, name, turns)
        if self.sizes.yarn is not None:
            positions = torch.arange(start, start + len(x), device=q.device)
            q = (q * query_scale(positions, self.sizes.yarn)[:, None]).to(q.dtype)
        if slots is not None:
            k, v = slots[name] = _written(slots.get(name), (k, v), start)
        groups = self.sizes.heads // self.sizes.kv_heads
        if groups > 1:
            k = k.repeat_interleave(groups, 0)
            v = v.repeat_interleave(groups, 0)
        scores = (q @ k.transpose(1, 2)).float() / q.shape[-1] ** 0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        out = (scores.softmax(-1).to(v.dtype) @ v).transpose(0, 1).reshape(len(x), -1)
        return self._linear(out, f"{name}.o_proj")

    def _gated(self, x: Tensor, name: str) -> Tensor:
        gate = silu(self._linear(x, f"{name}.gate_proj"))
        up = self._linear(x, f"{name}.up_proj")
        return self._linear(gate * up, f"{name}.down_proj")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        if self.router is None or f"{name}.gate.weight" not in self.weights:
            return self._gated(x, name)
        gate = self.weights[f"{name}.gate.weight"]
        bias_E = self.weights.get(
            f"{name}.gate.expert_bias", torch.zeros(1, device=x.device)
        )
        shares = self.router.shares(linear(x.to(gate.dtype), gate).float(), bias_E)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in shares.any(0).nonzero().flatten().tolist():
            rows = shares[:, expert].nonzero().flatten()
            part = self._gated(x[rows], f"{name}.experts.{expert}")
            out[rows] += shares[rows, expert, None] * part
        if f"{name}.shared_experts.gate_proj.weight" in self.weights:
            out += self._gated(x, f"{name}.shared_experts")
        return out.to(x.dtype)

    @torch.no_grad()
    def _states(
        self,
        tokens: list[int],
        visible: Tensor | None,
        start: int = 0,
        slots: Slots | None = None,
    ) -> list[Tensor]:
        """Compute the states after the embedding and every layer; None: all see everything."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        states, turns = [x], self._turns(start, len(tokens))
        for i in range(self.sizes.layers):
            layer = f"model.layers.{i}"
            inner = self._norm(x, f"{layer}.input_layernorm")
            x = x + self._attend(
                inner, f"{layer}.self_attn", visible, turns, start, slots
            )
            inner = self._norm(x, f"{layer}.post_attention_layernorm")
            x = x + self._mlp(inner, f"{layer}.mlp")
            states.append(x)
        return states

    @torch.no_grad()
    def _head(self, x: Tensor) -> Tensor:
        return self._linear(self._norm(x, "model.norm"), "lm_head").float()

    def _visible(self, block: list[int]) -> Tensor:
        block_N = torch.tensor(block, device=self.device)
        return block_N[:, None] >= block_N[None, :]

    def states(self, tokens: list[int], block: list[int]) -> States:
        """Compute the hidden states after the embedding and every layer, and logits."""
        states = self._states(tokens, self._visible(block))
        return states, self._head(states[-1])

    def exact_states(self, tokens: list[int], block: list[int]) -> States:
        """Compute as `states`, in float32 from the same weights."""
        return replace(self, weights=InFloat32(self.weights)).states(tokens, block)

    def rows(self, tokens: list[int], block: list[int]) -> Tensor:
        """Compute logits ``[N, V]``; the query at i sees the key at j if block[i] >= block[j]."""
        return self.states(tokens, block)[1]

    def rows_at(self, start: int, tokens: list[int], slots: Slots) -> Tensor:
        """Compute logits ``[N, V]`` of tokens from `start` on, which see every slot.

        Each writes its own slot before anyone looks. Slots are as many as were ever written.
        """
        return self._head(self._states(tokens, None, start, slots)[-1])

    def stored(self, tokens: list[int]) -> Slots:
        """Return the slots that a causal forward of tokens from position 0 on fills."""
        slots: Slots = {}
        self._states(tokens, self._visible(list(range(len(tokens)))), 0, slots)
        return slots

    def predictions(self, tokens: list[int], block: list[int]) -> Tensor:
        """Compute as `rows`, but row p predicts the token at position p."""
        rows = self.rows(tokens, block)
        return torch.cat([rows[:1], rows[:-1]]) if self.shift else rows


def _mask_id(folder: Path, sizes: Sizes) -> int:
    if sizes.raw.get("mask_token_id") is not None:
        return int(sizes.raw["mask_token_id"])
    text = (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    added = json.loads(text)["added_tokens_decoder"]
    return next(int(n) for n, t in added.items() if t["content"] == MASKS[sizes.kind])


def _written(
    kept: tuple[Tensor, Tensor] | None, computed: tuple[Tensor, Tensor], start: int
) -> tuple[Tensor, Tensor]:
    """Write keys and values into their slots, in place if there are so many; return all."""
    stop = start + computed[0].shape[1]
    if kept is None:
        return computed
    if stop > kept[0].shape[1]:
        k, v = (
            torch.cat([old[:, :start], new], dim=1)
            for old, new in zip(kept, computed, strict=True)
        )
        return k, v
    for old, new in zip(kept, computed, strict=True):
        old[:, start:stop] = new
    return kept


def stretched(frequency: Tensor, theta: float, yarn: Mapping[str, float]) -> Tensor:
    """Return YaRN's frequencies: slow frequencies are divided by its factor."""
    half = len(frequency)

    def turning(times: float) -> float:
        """Return which frequency turns so often in the original context."""
        context = yarn["original_max_position_embeddings"]
        return half * math.log(context / (times * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(turning(yarn["beta_fast"])), 0)
    high = min(math.ceil(turning(yarn["beta_slow"])), 2 * half - 1)
    place = torch.arange(half, device=frequency.device)
    slow = ((place - low) / ((high - low) or 0.001)).clamp(0, 1)
    return frequency * (slow / yarn["factor"] + 1 - slow)


def query_scale(positions: Tensor, yarn: Mapping[str, float]) -> Tensor:
    """Return by what the queries of positions are multiplied: 1 in the original context."""
    times = (positions / yarn["original_max_position_embeddings"]).floor()
    return 1 + yarn["llama_4_scaling_beta"] * (1 + times).log()


def rotate(x: Tensor, turns: Turns) -> Tensor:
    """Rotate the pairs (i, i + half) of the first positions of the last axis, in float32."""
    cos, sin = turns
    half, size = cos.shape[-1], x.shape[-1]
    first, second, kept = x.float().split([half, half, size - 2 * half], -1)
    parts = [first * cos - second * sin, second * cos + first * sin, kept]
    return torch.cat(parts, dim=-1).to(x.dtype)
