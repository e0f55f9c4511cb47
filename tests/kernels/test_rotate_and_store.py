"""Rotation and store: the Triton kernel against its reference, the reference against vLLM."""

import pytest
import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from dllm_plugin.kernels.rotate_and_store import FLOAT8, rotate_and_store_reference

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


def float8_case(*sizes, scales, keeps=False, largest=3.0):
    """Arguments in bfloat16 with a cache of bytes, full of NaN, and float8 queries."""
    arguments = case(*sizes, dtype=torch.bfloat16)
    query, key, value = arguments[:3]
    for x in (query, key, value):
        x.mul_(largest)
    cache = torch.full(arguments[5].shape, 0x7F, dtype=torch.uint8)
    outs = [torch.full(x.shape, torch.nan).to(FLOAT8) for x in (query, key)]
    if not keeps:
        outs[1] = None
    scales = tuple(torch.tensor(scale) for scale in scales)
    return [*arguments[:5], cache, arguments[6], *outs, scales]


SLOTS = [31, 32, -1, 5, 0]
FLOAT8_CASES = {
    "scale 1": float8_case(8, 8, 64, 16, SLOTS, scales=(1.0, 1.0, 1.0)),
    "a scale for each tensor": float8_case(
        *(28, 4, 128, 16, SLOTS), scales=(0.037, 0.043, 0.051)
    ),
    "a scale in a list": float8_case(3, 1, 32, 48, SLOTS, scales=([0.3], [0.7], [1.9])),
    "a scale for each head": float8_case(
        *(6, 2, 64, 16, SLOTS), scales=([0.3, 0.011], [0.7, 0.05], [0.09, 3.0])
    ),
    "clipped": float8_case(
        *(4, 4, 64, 16, SLOTS), scales=(0.5, 0.5, 0.25), largest=300.0
    ),
    "small, where float8 has fewer bits": float8_case(
        *(4, 4, 64, 16, SLOTS), scales=(1.0, 1.0, 1.0), largest=0.01
    ),
    "keys kept": float8_case(
        *(5, 5, 80, 32, SLOTS), scales=(0.2, 0.3, 0.4), keeps=True
    ),
}
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
    """The cache, and the rotated queries and keys."""
    results = [x if x is None else x.clone() for x in arguments[5:9]]
    # Not cloned: slices of one tensor, as the model has them.
    rotate_and_store_reference(*arguments[:5], *results, *arguments[9:])
    return results[0], *results[2:]


@pytest.fixture(scope="module")
def interpreted(interpreter):
    """Name -> results and cache of the kernel."""
    cases = CASES | FLOAT8_CASES
    launches = [(KERNEL, None, arguments, {}) for arguments in cases.values()]
    results = [arguments for _, arguments in interpreter.run(launches)]
    return {name: (x[5], *x[7:9]) for name, x in zip(cases, results, strict=True)}


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


@pytest.mark.parametrize("name", FLOAT8_CASES)
def test_the_kernel_has_the_bytes_of_the_reference(name, interpreted):
    for got, want in zip(
        interpreted[name], run_reference(FLOAT8_CASES[name]), strict=True
    ):
        if want is None:
            assert got is None
        else:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("name", FLOAT8_CASES)
def test_float8_of_the_unconverted_results(name):
    """Rotate in bfloat16, then convert head by head, as vLLM's store and its queries do."""
    *inputs, _, slots, _, _, scales = FLOAT8_CASES[name]
    plain = [torch.empty_like(x) for x in inputs[:2]]
    pages, kv_heads, page, width = FLOAT8_CASES[name][5].shape
    cache = torch.zeros(pages, kv_heads, page, width, dtype=torch.bfloat16)
    rotate_and_store_reference(*inputs, cache, slots, *plain)
    stored, query, *_ = run_reference(FLOAT8_CASES[name])
    clipped = 0
    for head in range(query.shape[1]):
        scale = scales[0].flatten().expand(kv_heads)[head * kv_heads // query.shape[1]]
        wanted = plain[0][:, head].float() * (1 / scale)
        assert torch.equal(query[:, head].float(), limited(wanted).float())
    for token, slot in enumerate(slots.tolist()):
        for head in range(kv_heads if slot >= 0 else 0):
            both = plain[1][token, head], inputs[2][token, head]
            wanted = [
                x.float() / scale.flatten().expand(kv_heads)[head]
                for x, scale in zip(both, scales[1:], strict=True)
            ]
            wanted = torch.cat(wanted)
            clipped += int((wanted.abs() > 448).sum())
            found = stored[slot // page, head, slot % page]
            assert torch.equal(found.view(FLOAT8).float(), limited(wanted).float())
    assert (clipped > 0) == (name == "clipped")
    untouched = (stored == 0x7F).all(dim=3).all(dim=1)
    assert int((~untouched).sum()) == int((slots >= 0).sum())


def limited(x):
    """The nearest float8 of numbers, at most the largest."""
    return x.clamp(-448, 448).to(FLOAT8)
