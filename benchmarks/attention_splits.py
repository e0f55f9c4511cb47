"""FlashAttention 3 by number of splits of the keys: one layer, one request, microseconds.

A GPU with FlashAttention 3 is needed. Rows are a canvas's blocks, each on the context and the
canvas up to its end; keys of 24 layers in turn, so that they do not stay in the chip's cache; one
CUDA graph. The combination of splits is in the time.
"""

import torch
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata

PAGE, HEAD, LAYERS, ROUNDS, LONGEST = 16, 128, 24, 4, 8448
SHAPES = {"llada": (32, 32), "dream": (28, 4)}
ROWS = ((2, 16), (1, 32), (2, 64))
CONTEXTS = (256, 1024, 4096)
SPLITS = (32, 1, 2, 3, 4)  # 32: at most, which is vLLM's choice under full CUDA graphs


def microseconds(heads: int, kv_heads: int, rows: int, length: int, context: int, splits: int):
    """Median of twenty replays, of one layer."""
    torch.manual_seed(0)
    on_gpu = {"device": "cuda", "dtype": torch.bfloat16}
    tokens = rows * length
    pages = -(-(context + tokens) // PAGE)
    caches = [torch.randn(pages, PAGE, 2, kv_heads, HEAD, **on_gpu) for _ in range(LAYERS)]
    query = torch.randn(tokens, heads, HEAD, **on_gpu)
    out = torch.empty_like(query)
    ints = {"device": "cuda", "dtype": torch.int32}
    bounds = torch.arange(0, tokens + 1, length, **ints)
    keys = torch.arange(1, rows + 1, **ints) * length + context
    table = torch.arange(pages, **ints).repeat(rows, 1)
    schedule = get_scheduler_metadata(
        batch_size=rows,
        max_seqlen_q=length,
        max_seqlen_k=LONGEST,
        num_heads_q=heads,
        num_heads_kv=kv_heads,
        headdim=HEAD,
        cache_seqlens=keys,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=bounds,
        page_size=PAGE,
        num_splits=splits,
    )

    def all_layers() -> None:
        for cache in caches:
            flash_attn_varlen_func(
                *(query, cache[:, :, 0], cache[:, :, 1], length, bounds, LONGEST),
                seqused_k=keys,
                block_table=table,
                out=out,
                fa_version=3,
                num_splits=splits,
                scheduler_metadata=schedule,
            )

    all_layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            all_layers()
    times = []
    for _ in range(20):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (ROUNDS * LAYERS))
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    print("shapes rows x length, context:", *(f"{splits:>6}" for splits in SPLITS), "splits")
    for name, heads in SHAPES.items():
        for rows in ROWS:
            for context in CONTEXTS:
                found = [microseconds(*heads, *rows, context, splits) for splits in SPLITS]
                print(f"{name} {rows[0]} x {rows[1]}, {context}:", *(f"{us:6.2f}" for us in found))
