"""Cascade attention gives what one sequence per block gives, bf16, also replayed from a graph."""

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


@pytest.mark.parametrize("heads", [(8, 8), (8, 4)])
@pytest.mark.parametrize(
    ("canvas", "length"),
    [(64, 16), (64, 32), (64, 24), (32, 20), (8, 5), (3, 2), (2, 1)],
)
def test_cascade(heads, canvas, length):
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
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    with set_current_vllm_config(VllmConfig()):
        impl = SegmentFlashImpl(
            heads[0], HEAD, HEAD**-0.5, heads[1], None, None, "auto"
        )
    layer = torch.nn.Module()
    layer._q_scale = layer._k_scale = layer._v_scale = torch.ones(1, device="cuda")
    place = torch.tensor(contexts, device="cuda")[:, None] + torch.arange(
        canvas, device="cuda"
    )
    slots = table.gather(1, place // PAGE).long() * PAGE + place % PAGE
    impl.do_kv_cache_update(layer, key, value, cache, slots.flatten())

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
    expected, found = torch.empty_like(query), torch.empty_like(query)
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
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)

    graph = torch.cuda.CUDAGraph()
    cascade.seq_lens.zero_()
    with torch.cuda.graph(graph):
        impl.forward(layer, query, key, value, cache, cascade, found)
    cascade.seq_lens.copy_(torch.tensor(contexts))
    found.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
