"""The `distinct` KV layout: references against a plain loop, Triton kernels against references.

The kernels run in Triton's interpreter, in a process of its own.
"""

import pytest
import spans
import torch

from dllm_plugin.kernels import paged_store
from dllm_plugin.kernels.paged_attention import reference as attention_reference

STORE = "dllm_plugin.kernels.paged_store.store_kv"
ATTEND = "dllm_plugin.kernels.paged_attention.kernel.attend_spans"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def store_case(kv_heads, head, page, slots, seed=0):
    """Arguments of `store_kv`: keys and values as slices of one tensor, a cache full of NaN."""
    rng = torch.Generator().manual_seed(seed)
    size = kv_heads * head
    fused = torch.randn(len(slots), 3 * size, generator=rng)
    key, value = (
        x.unflatten(1, (kv_heads, head)) for x in fused.split(size, dim=1)[1:]
    )
    cache = torch.full((9, kv_heads, page, 2 * head), torch.nan)
    return [key, value, *paged_store.split_cache(cache, head), torch.tensor(slots)]


STORES = {
    "ragged, some not stored": store_case(2, 64, 16, [5, -1, 6, 7, -1, 143, 0, 16, 31]),
    "nothing is stored": store_case(1, 64, 32, [-1] * 40),
    "three heads over several programs": store_case(
        3, 32, 64, [*range(100, 190), -1, 575]
    ),
    "pages of 256": store_case(1, 128, 256, [*range(250, 262), 2303]),
    "pages of 512": store_case(2, 64, 512, [*range(500, 530), -1, 4607]),
    "large pages that no key tile divides": store_case(
        1, 32, 528, [*range(520, 540), 4751]
    ),
    "page size that is no power of two": store_case(2, 32, 48, [*range(40, 60), -1]),
}


@pytest.fixture(scope="module")
def interpreted(interpreter):
    """(case is a store, its name) -> arguments after the kernels' run."""
    launches = [(STORE, None, case, {}) for case in STORES.values()]
    for case in spans.CASES.values():
        arguments, constants = spans.build(case)
        constants["num_units"] = case.units
        launches.append((ATTEND, None, arguments, constants))
    results = [arguments for _, arguments in interpreter.run(launches)]
    keys = [
        *((True, name) for name in STORES),
        *((False, name) for name in spans.CASES),
    ]
    return dict(zip(keys, results, strict=True))


@pytest.mark.parametrize("name", STORES)
def test_store_writes_what_the_reference_writes(name, interpreted):
    key, value, key_cache, value_cache, slots = STORES[name]
    keys, values = key_cache.clone(), value_cache.clone()
    paged_store.store_kv_reference(key, value, keys, values, slots)
    for got, want in zip(interpreted[True, name][2:4], (keys, values), strict=True):
        assert torch.equal(got.nan_to_num(7e7), want.nan_to_num(7e7))


def test_a_stored_token_lies_where_the_layout_says():
    key, value, key_cache, value_cache, _ = store_case(2, 64, 16, [37])
    paged_store.store_kv_reference(
        key, value, key_cache, value_cache, torch.tensor([37])
    )
    assert key_cache.shape == (9, 2, 16, 16, 4) and value_cache.shape == (9, 2, 64, 16)
    for d in (0, 3, 4, 63):
        assert key_cache[2, 1, d // 4, 5, d % 4] == key[0, 1, d]
        assert value_cache[2, 1, d, 5] == value[0, 1, d]
    assert int(key_cache.isfinite().sum()) == int(value_cache.isfinite().sum()) == 128


@pytest.mark.parametrize("name", spans.CASES)
def test_the_reference_agrees_with_a_plain_loop(name):
    case = spans.CASES[name]
    arguments, constants = spans.build(case)
    attention_reference.attend_spans(*arguments, **constants)
    torch.testing.assert_close(
        *(arguments[-1], spans.plain(arguments)),
        **dict(atol=TOLERANCE[case.dtype], rtol=0, equal_nan=True),
    )


@pytest.mark.parametrize("name", spans.CASES)
def test_the_kernel_agrees_with_the_reference(name, interpreted):
    case = spans.CASES[name]
    arguments, constants = spans.build(case)
    attention_reference.attend_spans(*arguments, **constants)
    torch.testing.assert_close(
        *(interpreted[False, name][-1], arguments[-1]),
        **dict(atol=TOLERANCE[case.dtype], rtol=0, equal_nan=True),
    )


def test_batches_of_one_size_but_other_borders_do_not_share_a_mask():
    """Earlier kernels of this kind cached block masks by shape alone."""
    first, constants = spans.build(spans.Spans([6, 10], [20, 12]))
    other, _ = spans.build(spans.Spans([6, 10], [20, 12], rule=spans.absolute_grid))
    for arguments in (first, other):
        attention_reference.attend_spans(*arguments, **constants)
    assert not torch.allclose(first[-1], other[-1])
    torch.testing.assert_close(other[-1], spans.plain(other), atol=2e-6, rtol=0)


def test_what_two_forwards_compute_equals_one():
    """Keys that one forward stores are the next one's context: the layout round trip."""
    arguments, constants = spans.build(
        spans.Spans([30], [0], group=2, rule=spans.absolute_grid)
    )
    attention_reference.attend_spans(*arguments, **constants)
    query, key, value, key_cache, value_cache, _, _, seen, table, scale, whole = (
        arguments
    )
    slots = table[0, torch.arange(20) // 16].long() * 16 + torch.arange(20) % 16
    paged_store.store_kv_reference(key[:20], value[:20], key_cache, value_cache, slots)
    out = torch.full_like(whole[20:], torch.nan)
    bounds, start = torch.tensor([0, 10]).int(), torch.tensor([20]).int()
    rest = [
        query[20:],
        key[20:],
        value[20:],
        key_cache,
        value_cache,
        bounds,
        start,
        seen[20:],
    ]
    attention_reference.attend_spans(*rest, table, scale, out, 10)
    torch.testing.assert_close(out, whole[20:], atol=2e-6, rtol=0)
