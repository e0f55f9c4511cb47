"""Rotations deferred to attention: of which layers, and what attention then gets."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dllm_plugin.attention.flash import SegmentFlashBackend, SegmentFlashImpl
from dllm_plugin.attention.rotary import Deferred, defer

HEAD, HEADS, KV_HEADS = 8, 4, 2
CLASSES = (LlamaAttention, Qwen2Attention)
FLASH = AttentionBackendEnum.FLASH_ATTN


@pytest.fixture(scope="module", autouse=True)
def configured() -> Iterator[None]:
    """vLLM asks it for how its layers are to be run."""
    with set_current_vllm_config(VllmConfig()):
        yield


class Scaled(RotaryEmbedding):
    """As models with another rule for their angles have it."""


def rotation(
    kind: type = RotaryEmbedding, dim: int = HEAD, neox: bool = True
) -> RotaryEmbedding:
    found: RotaryEmbedding = kind(HEAD, dim, 64, 1e4, neox, torch.float32)
    return found


def layer(kind: Any, rotary: nn.Module, impl: Any, cache: str = "auto") -> Any:
    """vLLM's layer without its weights: QKV are columns of the input, the output is as it comes."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.head_dim, made.num_heads, made.num_kv_heads = HEAD, HEADS, KV_HEADS
    made.q_size, made.kv_size, made.qk_norm = HEADS * HEAD, KV_HEADS * HEAD, False
    made.rotary_emb = rotary
    seen: list[tuple[torch.Tensor, ...]] = []

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs)
        return inputs[0]

    attend.impl, attend.kv_cache_dtype = impl, cache  # type: ignore[attr-defined]
    made.attn, made.seen = attend, seen
    made.qkv_proj = made.o_proj = lambda x: (x, None)
    return made


@pytest.mark.parametrize("kind", CLASSES)
def test_attention_gets_queries_and_keys_that_are_not_rotated(kind: type) -> None:
    impl = SegmentFlashImpl.__new__(SegmentFlashImpl)
    made, rotary = layer(kind, rotation(), impl), rotation()
    made.rotary_emb = rotary
    qkv, positions = torch.randn(3, (HEADS + 2 * KV_HEADS) * HEAD), torch.arange(5, 8)
    made(positions=positions, hidden_states=qkv)
    defer(nn.ModuleList([made]), FLASH)
    made(positions=positions, hidden_states=qkv)
    (rotated, _, _), not_rotated = made.seen
    wanted = qkv.split([made.q_size, made.kv_size, made.kv_size], dim=-1)
    assert all(
        torch.equal(got, want) for got, want in zip(not_rotated, wanted, strict=True)
    )
    assert not torch.equal(rotated, wanted[0])
    assert impl.rotation is rotary and isinstance(made.rotary_emb, Deferred)
    assert made.attn.attn_backend.forward_includes_kv_cache_update
    assert not SegmentFlashBackend.forward_includes_kv_cache_update
    assert "rotary_emb.rotation.cos_sin_cache" in dict(made.named_buffers())


@pytest.mark.parametrize(
    ("how", "cache"),
    [
        ({"kind": Scaled}, "auto"),
        ({"dim": 4}, "auto"),
        ({"neox": False}, "auto"),
        ({}, "fp8"),
    ],
    ids=["other angles", "part of a head", "pairs", "quantised keys"],
)
def test_other_layers_rotate_as_before(how: dict[str, Any], cache: str) -> None:
    impl, rotary = SegmentFlashImpl.__new__(SegmentFlashImpl), rotation(**how)
    made = layer(LlamaAttention, rotary, impl, cache)
    defer(nn.ModuleList([made]), FLASH)
    assert made.rotary_emb is rotary and impl.rotation is None


@pytest.mark.parametrize("backend", [None, AttentionBackendEnum.TRITON_ATTN, FLASH])
def test_other_backends_get_rotated_queries(
    backend: AttentionBackendEnum | None,
) -> None:
    """Also where FLASH_ATTN is asked for and a layer has another implementation of it."""
    impl = (
        SimpleNamespace()
        if backend == FLASH
        else SegmentFlashImpl.__new__(SegmentFlashImpl)
    )
    made = layer(LlamaAttention, rotation(), impl)
    before = made.rotary_emb
    defer(nn.ModuleList([made]), backend)
    assert made.rotary_emb is before
