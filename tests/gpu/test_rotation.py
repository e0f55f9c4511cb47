"""Rotation inside of FlashAttention's backend: the kernel, and texts against Triton's backend.

Needs a Hopper GPU. Under TRITON_ATTN the model's own layers rotate.
"""

import pytest
import torch
from dummies import worker_of
from test_flash_graphs import BEFORE_TIES, agree, end, engine_of, graphs
from test_flash_graphs import in_process as in_process
from test_flash_graphs import pytestmark as pytestmark

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


@pytest.mark.parametrize("family", ["llada", "dream", "fast-dllm-v2"])
def test_texts(family):
    """One position after the other; two forms of attention agree up to near ties.

    In float16: bfloat16 has many exact ties on these models.
    """
    from engines import a_prompt, params, step_through

    from dllm_plugin.attention.rotary import Deferred

    wish = {"dllm_block_length": 1, "logprobs": 5}
    arrivals = {
        3 * n: [(f"text-{n}", a_prompt(5 + 37 * n, n), params(48, **wish))]
        for n in range(6)
    }
    answers = {}
    for backend in ("FLASH_ATTN", "TRITON_ATTN"):
        options = {"backend": backend, "max_model_len": 512, "dtype": "float16"}
        engine = engine_of(f"tiny-{family}", BLOCKS, graphs(16), **options)
        model = worker_of(engine).model_runner.model
        deferred = sum(isinstance(module, Deferred) for module in model.modules())
        assert deferred == (
            model.config.num_hidden_layers if backend == "FLASH_ATTN" else 0
        )
        answers[backend] = step_through(engine, arrivals)
        end(engine)
    assert agree(answers["FLASH_ATTN"], answers["TRITON_ATTN"]) > BEFORE_TIES
