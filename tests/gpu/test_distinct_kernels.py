"""Kernels of the `distinct` KV layout on a GPU against their references, in three dtypes."""

import random
from dataclasses import replace

import pytest
import spans
import torch

from dllm_plugin.kernels import paged_store
from dllm_plugin.kernels.paged_attention import kernel as attention_kernel
from dllm_plugin.kernels.paged_attention import reference as attention_reference

# References compute in fp32 from the same rounded inputs; kernels round weights and results.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


def compare(case, seed=0):
    arguments, constants = spans.build(case, seed, "cuda")
    attention_kernel.attend_spans(*arguments, **constants, num_units=case.units)
    expected = [*arguments[:-1], torch.full_like(arguments[-1], torch.nan)]
    attention_reference.attend_spans(*expected, **constants)
    torch.testing.assert_close(
        *(arguments[-1], expected[-1]),
        atol=TOLERANCE[case.dtype],
        rtol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", spans.CASES)
def test_named_cases(name, dtype):
    compare(replace(spans.CASES[name], dtype=dtype))


RULES = (
    *(
        spans.block_causal,
        spans.bidirectional,
        spans.prompt_then_blocks,
        spans.absolute_grid,
    ),
    spans.nothing,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", [32, 64, 128])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_sweep(group, head, dtype):
    rng = random.Random(f"{group} {head} {dtype}")
    for seed in range(12):
        requests = rng.choice([1, 2, 3, 9, 300 if seed == 0 else 5])
        longest = rng.choice([1, 20, 70, 150, 600 if requests < 4 else 40])
        rule = rng.choice(RULES)
        compare(
            spans.Spans(
                [rng.randint(0 if i else 1, longest) for i in range(requests)],
                [
                    rng.choice([0, rng.randint(0, 300), 64 * rng.randint(0, 4)])
                    for _ in range(requests)
                ],
                kv_heads=rng.choice([1, 2, 3, 4]),
                group=group,
                head=head,
                page=rng.choice([16, 32, 48, 64, 128, 256]),
                rule=rule,
                behind=rng.choice([0, 0, 37, 200])
                if rule is spans.bidirectional
                else 0,
                padding=rng.choice([0, 5]),
                units=rng.choice([1, 8, 132]),
                dtype=dtype,
            ),
            seed,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_contexts_in_every_number_of_splits(dtype):
    for units in (1, 4, 8, 16, 32, 64, 132):
        case = spans.Spans(
            [32, 9], [8192, 3000], 4, 7, 128, 64, units=units, dtype=dtype
        )
        compare(case, units)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [16, 48, 64, 256])
@pytest.mark.parametrize("heads,head", [(1, 128), (3, 32), (4, 128), (32, 64)])
def test_store(heads, head, page, dtype):
    for tokens in (1, 31, 32, 33, 500):
        rng = torch.Generator().manual_seed(tokens)
        fused = torch.randn(tokens, 3 * heads * head, generator=rng).to("cuda", dtype)
        key, value = (
            t.unflatten(1, (heads, head)) for t in fused.split(heads * head, 1)[1:]
        )
        slots = torch.randperm(40 * page, generator=rng)[:tokens]
        slots[torch.rand(tokens, generator=rng) < 0.3] = -1
        caches = []
        for store in (paged_store.store_kv, paged_store.store_kv_reference):
            cache = torch.full(
                (40, heads, page, 2 * head), torch.nan, dtype=dtype, device="cuda"
            )
            store(key, value, *paged_store.split_cache(cache, head), slots.cuda())
            caches.append(cache)
        torch.testing.assert_close(*caches, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("units", [1, 64])
def test_a_captured_graph_follows_its_inputs(units):
    """Captured for one batch, replayed for batches of other lengths, contexts and borders."""
    shape = dict(
        kv_heads=2, group=7, head=128, page=64, units=units, dtype=torch.bfloat16
    )
    batches = [
        spans.Spans([64, 64, 64], [0, 0, 0], padding=1, **shape),
        spans.Spans([64, 30, 64], [900, 3, 64], padding=35, **shape),
        spans.Spans(
            [1, 64, 2], [77, 640, 1], rule=spans.absolute_grid, padding=126, **shape
        ),
    ]
    built = [spans.build(case, seed, "cuda")[0] for seed, case in enumerate(batches)]
    width = max(arguments[8].shape[1] for arguments in built)
    pages = max(len(arguments[3]) for arguments in built)
    cache = torch.full(
        (pages, 2, 64, 256), torch.nan, dtype=torch.bfloat16, device="cuda"
    )
    buffers = [torch.zeros_like(tensor) for tensor in built[0][:3]]
    caches = paged_store.split_cache(cache, 128)
    bounds, start = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (5, 4))
    seen = torch.zeros(193, dtype=torch.int32, device="cuda")
    table = torch.zeros(4, width, dtype=torch.int32, device="cuda")
    out = torch.zeros_like(buffers[0])
    inputs = [*buffers, *caches, bounds, start, seen, table, 128**-0.5, out]

    def fill(arguments):
        for target, source in zip(inputs[:3], arguments[:3], strict=True):
            target.copy_(source)
        for target, source in zip(caches, arguments[3:5], strict=True):
            target[: len(source)] = source
        num = len(arguments[6])
        bounds.fill_(arguments[5][-1])
        bounds[: min(num, 4) + 1] = arguments[5][: min(num, 4) + 1]
        start.zero_()[: min(num, 4)] = arguments[6][:4]
        seen.copy_(arguments[7])
        rows = arguments[8][:4]
        table.zero_()[: len(rows), : rows.shape[1]] = rows
        out.fill_(torch.nan)

    fill(built[0])
    attention_kernel.attend_spans(*inputs, 64, num_units=units)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_kernel.attend_spans(*inputs, 64, num_units=units)
    for arguments in built:
        fill(arguments)
        graph.replay()
        expected = [*arguments[:-1], torch.full_like(arguments[-1], torch.nan)]
        attention_reference.attend_spans(*expected, 64)
        torch.testing.assert_close(out, expected[-1], atol=3e-2, rtol=0, equal_nan=True)
