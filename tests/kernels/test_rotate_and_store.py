"""Rotation and store: the Triton kernel against its reference, the reference against vLLM."""

import pytest
import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from dllm_plugin.kernels.rotate_and_store import rotate_and_store_reference

KERNEL = "dllm_plugin.kernels.rotate_and_store.rotate_and_store"
PAGES, POSITIONS = 9, 300


def case(
    heads, kv_heads, head, page, slots, tokens=None, dtype=torch.float32, keeps_key=True
):
    """Arguments: slices of one tensor, positions without order, a cache full of NaN."""
    rng = torch.Generator().manual_seed(heads)
    tokens = tokens or len(slots)
    sizes = [heads * head, kv_heads * head, kv_heads * head]
    qkv = torch.randn(tokens, sum(sizes), generator=rng).to(dtype)
    query, key, value = (x.unflatten(1, (-1, head)) for x in qkv.split(sizes, dim=1))
    angles = torch.outer(
        torch.arange(POSITIONS), 1e4 ** -torch.linspace(0, 1, head // 2)
    )
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    cache = torch.full((PAGES, kv_heads, page, 2 * head), torch.nan, dtype=dtype)
    positions = torch.randint(0, POSITIONS, (tokens,), generator=rng)
    outs = [torch.full(x.shape, torch.nan, dtype=dtype) for x in (query, key)]
    outs[1] = outs[1] if keeps_key else None
    return [query, key, value, positions, table, cache, torch.tensor(slots), *outs]


CASES = {
    "as many keys as queries": case(8, 8, 64, 16, [5, -1, 6, 143, 0, 16]),
    "seven queries per key": case(28, 4, 128, 16, [31, 32, -1]),
    "one key, head of 32": case(3, 1, 32, 48, [*range(40, 60)]),
    "heads that are no power of two": case(5, 2, 80, 32, [7, 9]),
    "padding without slots": case(4, 4, 64, 16, [3, 1], tokens=5),
    "keys not kept": case(4, 2, 64, 16, [3, 1], keeps_key=False),
    "16 bits": case(8, 2, 64, 16, [5, 6, -1, 100], dtype=torch.float16),
}


def run_reference(arguments):
    """The cache and the rotated queries and keys."""
    copied = [x if x is None else x.clone() for x in arguments]
    # Not cloned: slices of one tensor, as the model has them.
    rotate_and_store_reference(*arguments[:5], *copied[5:])
    return copied[5], copied[7], copied[8]


@pytest.fixture(scope="module")
def interpreted(interpreter):
    """Name -> results and cache of the kernel."""
    launches = [(KERNEL, None, arguments, {}) for arguments in CASES.values()]
    results = [arguments for _, arguments in interpreter.run(launches)]
    return {name: (x[5], x[7], x[8]) for name, x in zip(CASES, results, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_agrees_with_the_reference(name, interpreted):
    tolerance = 2e-6 if CASES[name][0].dtype == torch.float32 else 1e-3
    for got, want in zip(interpreted[name], run_reference(CASES[name]), strict=True):
        if want is None:
            assert got is None
        else:
            torch.testing.assert_close(
                got, want, rtol=0, atol=tolerance, equal_nan=True
            )


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][8] is not None])
def test_the_reference_rotates_as_vllm_does(name):
    query, key, value, positions, table, cache, slots, *_ = CASES[name]
    head, page = query.shape[2], cache.shape[2]
    flat = (
        positions,
        query.flatten(1),
        key.flatten(1),
        head,
        head,
        table.to(query.dtype),
        True,
    )
    stored, got_query, got_key = run_reference(CASES[name])
    tolerance = 2e-6 if query.dtype == torch.float32 else 4e-3
    wanted = RotaryEmbedding.forward_static(*flat)
    for got, want in zip((got_query, got_key), wanted, strict=True):
        torch.testing.assert_close(got.flatten(1), want, rtol=0, atol=tolerance)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = stored[slot // page, :, slot % page]
            assert torch.equal(place, torch.cat([got_key[token], value[token]], dim=-1))
    assert int((~stored.isnan().any(dim=3).any(dim=1)).sum()) == int((slots >= 0).sum())
