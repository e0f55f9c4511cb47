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

from dllm_plugin.attention import flash
from dllm_plugin.attention.flash import SegmentFlashBackend, SegmentFlashImpl
from dllm_plugin.attention.rotary import Deferred, defer
from dllm_plugin.kernels.rotate_and_store import rotate_and_store_reference

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


def layer(kind: Any, rotary: nn.Module, impl: Any) -> Any:
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

    attend.impl = impl  # type: ignore[attr-defined]
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
    "how",
    [{"kind": Scaled}, {"dim": 4}, {"neox": False}],
    ids=["other angles", "part of a head", "pairs"],
)
def test_other_layers_rotate_as_before(how: dict[str, Any]) -> None:
    impl, rotary = SegmentFlashImpl.__new__(SegmentFlashImpl), rotation(**how)
    made = layer(LlamaAttention, rotary, impl)
    made.attn.query_quant = quantised = nn.Identity()
    defer(nn.ModuleList([made]), FLASH)
    assert made.rotary_emb is rotary and impl.rotation is None
    assert made.attn.query_quant is quantised


@pytest.mark.parametrize(
    ("cache_dtype", "suffix"), [("auto", False), ("auto", True), ("fp8", False)]
)
def test_what_attention_takes(
    cache_dtype: str, suffix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries have the type of the cache; in a cascade, of 16 bits, keys are rotated, too."""
    monkeypatch.setattr(flash, "rotate_and_store", rotate_and_store_reference)
    impl = SegmentFlashImpl.__new__(SegmentFlashImpl)
    impl.kv_cache_dtype, impl.num_kv_heads = cache_dtype, KV_HEADS
    made = layer(LlamaAttention, rotation(), impl)
    made.attn.query_quant = nn.Identity()
    defer(nn.ModuleList([made]), FLASH)
    assert made.attn.query_quant is None
    made.attn._q_scale, made.attn._k_scale = torch.tensor(2.0), torch.tensor(0.5)
    made.attn._v_scale = torch.tensor(0.25)
    query = torch.randn(3, HEADS, HEAD).bfloat16()
    key, value = torch.randn(2, 3, KV_HEADS, HEAD).bfloat16()
    dtype = torch.bfloat16 if cache_dtype == "auto" else torch.float8_e4m3fn
    as_kept = torch.bfloat16 if cache_dtype == "auto" else torch.uint8
    cache = torch.zeros(1, KV_HEADS, 16, 2 * HEAD, dtype=as_kept)
    metadata: Any = SimpleNamespace(
        positions=torch.arange(5, 8),
        slot_mapping=torch.arange(3),
        canvas_suffix=object() if suffix else None,
    )
    taken = impl._rotate(made.attn, query, key, value, cache, metadata)
    rotated_query, taken_key = taken
    assert rotated_query.dtype == dtype
    stored = cache.view(dtype)[0, :, :3].transpose(0, 1).float()
    kept_key, kept_value = stored.split(HEAD, dim=-1)
    if suffix:
        assert torch.equal(taken_key.float(), kept_key)
    else:
        assert taken_key is key
    if cache_dtype == "fp8":
        # Three bits after the first, and steps of 2**-9 next to zero.
        torch.testing.assert_close(
            kept_value * 0.25, value.float(), rtol=0.07, atol=2**-12
        )


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
