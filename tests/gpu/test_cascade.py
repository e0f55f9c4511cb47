"""Cascade attention gives what one sequence per block gives, also replayed from a graph.

In bf16, and in float8, where softmax weights are rounded to float8 too.
"""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs FlashAttention 3, so a Hopper GPU",
)
PAGE, HEAD, LONGEST = 16, 64, 512


def common(starts, seen, tables, canvas):
    starts = torch.tensor(starts, dtype=torch.int32)
    return {
        "max_query_len": canvas,
        "query_start_loc": starts.cuda(),
        "max_seq_len": LONGEST,
        "seq_lens": torch.tensor(seen, dtype=torch.int32).cuda(),
        "block_table": tables,
        "causal": False,
    }


def to_float8(x, scale):
    """Numbers divided by their scale, as float8."""
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


# A float8 weight is at most a sixteenth off, in each of both results.
@pytest.mark.parametrize(("cached", "tolerance"), [("auto", 2e-2), ("fp8", 0.4)])
@pytest.mark.parametrize("heads", [(8, 8), (8, 4)])
@pytest.mark.parametrize(
    ("canvas", "length"),
    [(64, 16), (64, 32), (64, 24), (32, 20), (8, 5), (3, 2), (2, 1)],
)
def test_cascade(heads, canvas, length, cached, tolerance):
    """Canvases in blocks, and run and window of short ones that float."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    from dllm_plugin.attention.cascade import CanvasSuffix
    from dllm_plugin.attention.flash import SegmentFlashImpl, SegmentFlashMetadata

    torch.manual_seed(length)
    requests, contexts = 5, [0, 3, 100, 17, 400]
    tokens, pages = requests * canvas, LONGEST // PAGE
    options = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(tokens, heads[0], HEAD, **options)
    # As they come from one projection.
    key, value = torch.randn(tokens, 2, heads[1], HEAD, **options).unbind(1)
    cache = torch.randn(requests * pages, heads[1], PAGE, 2 * HEAD, **options)
    scales = [torch.full((1,), scale, device="cuda") for scale in (0.5, 0.25, 2.0)]
    if cached == "fp8":
        cache = to_float8(cache, scales[1]).view(torch.uint8)
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    with set_current_vllm_config(VllmConfig()):
        impl = SegmentFlashImpl(
            heads[0], HEAD, HEAD**-0.5, heads[1], None, None, cached
        )
    layer = torch.nn.Module()
    layer._q_scale, layer._k_scale, layer._v_scale = scales
    place = torch.tensor(contexts, device="cuda")[:, None] + torch.arange(
        canvas, device="cuda"
    )
    slots = table.gather(1, place // PAGE).long() * PAGE + place % PAGE
    impl.do_kv_cache_update(layer, key, value, cache, slots.flatten())
    expected, found = torch.empty_like(query), torch.empty_like(query)
    if cached == "fp8":
        query, key, value = map(to_float8, (query, key, value), scales)

    stops = np.minimum(np.arange(1, canvas // length + 2) * length, canvas)
    stops_RS = np.tile(stops, (requests, 1))
    starts = [0, *(stops_RS + np.arange(requests)[:, None] * canvas).ravel()]
    request_B = torch.arange(
        requests, dtype=torch.int32, device="cuda"
    ).repeat_interleave(len(stops))
    slot_mapping = {"slot_mapping": slots.flatten(), "num_actual_tokens": tokens}
    seen = (stops_RS + np.array(contexts)[:, None]).ravel()
    plain = FlashAttentionMetadata(
        **common(starts, seen, table[request_B], canvas), **slot_mapping
    )
    impl.forward(layer, query, key, value, cache, plain, expected)

    suffix = CanvasSuffix(
        torch.tensor(starts, dtype=torch.int32, device="cuda"),
        torch.tensor(stops_RS.ravel(), dtype=torch.int32, device="cuda"),
        request_B[:, None],
        canvas,
    )
    bounds = np.arange(requests + 1) * canvas
    cascade = SegmentFlashMetadata(
        **common(bounds, contexts, table, canvas), **slot_mapping, canvas_suffix=suffix
    )
    impl.forward(layer, query, key, value, cache, cascade, found)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert (found - expected).abs().mean() < tolerance / 10

    graph = torch.cuda.CUDAGraph()
    cascade.seq_lens.zero_()
    with torch.cuda.graph(graph):
        impl.forward(layer, query, key, value, cache, cascade, found)
    cascade.seq_lens.copy_(torch.tensor(contexts))
    found.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
