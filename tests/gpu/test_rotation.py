"""Rotation inside of FlashAttention's backend: the kernel, and texts against Triton's backend.

Needs a Hopper GPU. Under TRITON_ATTN the model's own layers rotate.
"""

import pytest
import torch
from dummies import worker_of
from test_flash_graphs import BEFORE_TIES, agree, end, engine_of, graphs
from test_flash_graphs import in_process as in_process
from test_flash_graphs import pytestmark as pytestmark

from dllm_plugin.attention import rotary
from dllm_plugin.attention.rotary import Deferred
from dllm_plugin.kernels import rotate_and_store as rotation

BLOCKS = {"strategy": "block_diffusion", "block_length": 8, "commit_alone_from": 0}


@pytest.mark.parametrize("tokens", [1, 32, 128, 5000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (28, 4), (3, 1)])
def test_the_kernel_and_its_reference(heads, kv_heads, tokens):
    """Results may differ by a rounding, where products are rounded before they are added."""
    make = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(tokens)
    sizes = [heads * 128, kv_heads * 128, kv_heads * 128]
    qkv = torch.randn(tokens, sum(sizes), **make).split(sizes, dim=1)
    query, key, value = (x.unflatten(1, (-1, 128)) for x in qkv)
    positions = torch.randint(0, 9000, (tokens,), device="cuda")
    angles = torch.outer(torch.arange(9000), 1e4 ** -torch.linspace(0, 1, 64)).cuda()
    table = torch.cat([angles.cos(), angles.sin()], dim=1).bfloat16()
    slots = torch.randperm(16 * 400, device="cuda")[:tokens]
    slots[::7] = -1
    results = []
    for rotate in (rotation.rotate_and_store, rotation.rotate_and_store_reference):
        cache = torch.zeros(400, kv_heads, 16, 256, **make)
        outs = [torch.empty(x.shape, **make) for x in (query, key)]
        rotate(query, key, value, positions, table, cache, slots, *outs)
        results.append((cache, *outs))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("per_head", [False, True], ids=["tensor", "heads"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (28, 4), (3, 1)])
def test_float8_has_the_bytes_of_vllm(heads, kv_heads, per_head):
    """Rotated in bf16 and stored by vLLM's kernels, or all of it in ours; some are clipped."""
    from vllm import _custom_ops as ops

    tokens, make = 300, {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(heads)
    sizes = [heads * 128, kv_heads * 128, kv_heads * 128]
    qkv = 30 * torch.randn(tokens, sum(sizes), **make)
    query, key, value = (x.unflatten(1, (-1, 128)) for x in qkv.split(sizes, dim=1))
    positions = torch.randint(0, 9000, (tokens,), device="cuda")
    angles = torch.outer(torch.arange(9000), 1e4 ** -torch.linspace(0, 1, 64)).cuda()
    table = torch.cat([angles.cos(), angles.sin()], dim=1).bfloat16()
    slots = torch.randperm(16 * 40, device="cuda")[:tokens]
    slots[::7] = -1
    shape = (kv_heads,) if per_head else (1,)
    scales = tuple(torch.rand(3, *shape, device="cuda") * 0.3 + 0.05)
    inputs = (query, key, value, positions, table)

    plain = torch.empty(40, kv_heads, 16, 256, **make)
    rotated = [torch.empty(x.shape, **make) for x in (query, key)]
    rotation.rotate_and_store(*inputs, plain, slots, *rotated)
    wanted = torch.zeros(40, kv_heads, 16, 256, device="cuda", dtype=torch.uint8)
    pages = wanted.transpose(1, 2).split(128, dim=-1)
    stored = (rotated[1], value, *pages, slots, "fp8", *scales[1:])
    ops.reshape_and_cache_flash(*stored)
    by_head = scales[0].expand(kv_heads).repeat_interleave(heads // kv_heads)[:, None]
    wanted_query = rotated[0].float() * by_head.reciprocal()
    wanted_query = wanted_query.clamp(-448, 448).to(rotation.FLOAT8)

    found = torch.zeros_like(wanted)
    outs = [torch.empty_like(x, dtype=rotation.FLOAT8) for x in rotated]
    rotation.rotate_and_store(*inputs, found, slots, *outs, scales)
    assert torch.equal(found, wanted)
    assert torch.equal(outs[0].view(torch.uint8), wanted_query.view(torch.uint8))
    largest = found.view(rotation.FLOAT8).float().abs().max()
    assert largest == 448
    kept = slots >= 0
    place = found[slots[kept] // 16, :, slots[kept] % 16, :128]
    assert torch.equal(place, outs[1][kept].view(torch.uint8))


def texts_of(family, **options):
    """Texts that start at different steps, one position after the other."""
    from engines import a_prompt, params, step_through

    wish = {"dllm_block_length": 1, "logprobs": 5}
    arrivals = {
        3 * n: [(f"text-{n}", a_prompt(5 + 37 * n, n), params(48, **wish))]
        for n in range(6)
    }
    settings = {"max_model_len": 512} | options
    engine = engine_of(f"tiny-{family}", BLOCKS, graphs(16), **settings)
    model = worker_of(engine).model_runner.model
    deferred = sum(isinstance(module, Deferred) for module in model.modules())
    texts = step_through(engine, arrivals)
    end(engine)
    return texts, deferred / model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["llada", "dream", "fast-dllm-v2"])
def test_texts(family):
    """One position after the other; two forms of attention agree up to near ties.

    In float16: bfloat16 has many exact ties on these models.
    """
    answers = {}
    for backend, share in (("FLASH_ATTN", 1), ("TRITON_ATTN", 0)):
        options = {"backend": backend, "dtype": "float16"}
        answers[backend], deferred = texts_of(family, **options)
        assert deferred == share
    assert agree(answers["FLASH_ATTN"], answers["TRITON_ATTN"]) > BEFORE_TIES


@pytest.mark.parametrize("family", ["llada", "dream", "fast-dllm-v2"])
def test_texts_with_float8_keys(family, monkeypatch):
    """Rotated and converted by our kernel, or by vLLM's layers and its store."""
    fused, deferred = texts_of(family, kv_cache_dtype="fp8")
    assert deferred == 1
    monkeypatch.setattr(rotary, "_is_supported", lambda rotation, layer: False)
    apart, deferred = texts_of(family, kv_cache_dtype="fp8")
    assert deferred == 0
    assert agree(fused, apart) > BEFORE_TIES
