"""Compute LLaDA in a batch and with gradients, which the plain model does not.

The plain model of `dllm_plugin.reference` computes one text with every score in float32.
Training needs batches, gradients, a compiler and memory-saving attention, and writes its
weights under LLaDA's names. Architecture: GSAI-ML/LLaDA-8B-Instruct (RMSNorm, half-split
RoPE in float32, silu(ff_proj x) * up_proj x, no biases, untied head).
Tensor suffixes: B requests, T positions, D d_model, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

Weights = Mapping[str, Tensor]
PREFIX = "model.transformer."
ADAPTER_PREFIX = "base_model.model."
ADAPTED = ("q_proj", "k_proj", "v_proj", "attn_out")
PADDING_BLOCK = 1 << 20  # the block of padding, which no other position sees


@dataclass(frozen=True)
class Shape:
    """Store the sizes of a LLaDA model under the names of its config.json."""

    d_model: int = 192
    n_heads: int = 6
    n_layers: int = 6
    mlp_hidden_size: int = 448
    vocab_size: int = 512
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5


def linear_names(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every matrix of the layers, by checkpoint name without PREFIX."""
    d, m = shape.d_model, shape.mlp_hidden_size
    sizes = {name: (d, d) for name in ADAPTED}
    sizes |= {"ff_proj": (m, d), "up_proj": (m, d), "ff_out": (d, m)}
    return {
        f"blocks.{i}.{n}.weight": s
        for i in range(shape.n_layers)
        for n, s in sizes.items()
    }


def _norm(x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm: normalise in float32, cast back, then scale."""
    x32 = x_BTD.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return x32.to(x_BTD.dtype) * weight_D


def _rope_tables(
    length: int, head_size: int, theta: float, device: torch.device
) -> Tensor:
    """Return float32 [2, T, head_size]: cos and sin of positions 0..T-1 in half-split layout."""
    exponents = (
        torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    )
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents)
    angles = torch.cat([angles, angles], -1)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: Tensor, tables: Tensor) -> Tensor:
    """Rotate x [B, heads, T, head_size] in float32 (RoPE); return x's dtype."""
    x32 = x.float()
    left, right = x32.chunk(2, -1)
    return (x32 * tables[0] + torch.cat([-right, left], -1) * tables[1]).to(x.dtype)


def visibility(blocks_BT: Tensor) -> Tensor:
    """Return bool [B, 1, T, T]: position i sees position j iff block(i) >= block(j).

    Zeros give full attention. Prompt 0 and blocks 1, 2, ... give block-causal attention. Padding
    has the largest number, so that no other position sees it.
    """
    return (blocks_BT[:, :, None] >= blocks_BT[:, None, :])[:, None]


def forward(
    weights: Weights, shape: Shape, ids_BT: Tensor, blocks_BT: Tensor
) -> Tensor:
    """Compute logits [B, T, V]; those at p predict position p (LLaDA does not shift)."""

    def weight(name: str) -> Tensor:
        return weights[f"{PREFIX}{name}.weight"]

    batch, length = ids_BT.shape
    size = shape.d_model // shape.n_heads
    seen = visibility(blocks_BT)
    tables = _rope_tables(length, size, shape.rope_theta, ids_BT.device)
    x = F.embedding(ids_BT, weight("wte"))
    for i in range(shape.n_layers):
        block = f"blocks.{i}."
        h = _norm(x, weight(block + "attn_norm"), shape.rms_norm_eps)
        q, k, v = (
            F.linear(h, weight(block + name))
            .view(batch, length, shape.n_heads, size)
            .transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        attended = F.scaled_dot_product_attention(
            _rotate(q, tables), _rotate(k, tables), v, attn_mask=seen
        )
        attended = attended.transpose(1, 2).reshape(batch, length, shape.d_model)
        x = x + F.linear(attended, weight(block + "attn_out"))
        h = _norm(x, weight(block + "ff_norm"), shape.rms_norm_eps)
        gated = F.silu(F.linear(h, weight(block + "ff_proj")))
        x = x + F.linear(
            gated * F.linear(h, weight(block + "up_proj")), weight(block + "ff_out")
        )
    return F.linear(_norm(x, weight("ln_f"), shape.rms_norm_eps), weight("ff_out"))


def adapter_names(name: str) -> tuple[str, str]:
    """Return PEFT's names of lora_A and lora_B for the checkpoint weight `name`."""
    stem = ADAPTER_PREFIX + name.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def merge_adapter(
    weights: Weights, adapter: Weights, scale: float
) -> dict[str, Tensor]:
    """Replace W by W + scale * B @ A where the adapter has a pair; differentiable."""
    merged = dict(weights)
    pairs = 0
    for name, weight in weights.items():
        a, b = adapter_names(name)
        if a in adapter:
            merged[name] = weight + scale * (adapter[b] @ adapter[a])
            pairs += 1
    if 2 * pairs != len(adapter):
        raise ValueError(
            f"adapter has {len(adapter)} tensors, only {2 * pairs} fit this base"
        )
    return merged


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Load checkpoint weights as float32."""
    stored = load_file(folder / "model.safetensors")
    return {name: tensor.float() for name, tensor in stored.items()}


def load_adapter(folder: Path) -> dict[str, Tensor]:
    """Load an adapter's matrices as float32."""
    stored = load_file(folder / "adapter_model.safetensors")
    return {name: tensor.float() for name, tensor in stored.items()}
