"""Batches of spans for the kernels of the `distinct` KV layout, and what a plain loop says of them.

Memory that nobody may read holds NaN: pages of no request, slots that were not stored, the output
before the call. Block tables are cut off by page numbers far outside the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_plugin.kernels.paged_store import split_cache, store_kv_reference

BLOCK = 5  # length of the diffusion blocks, on purpose no divisor of anything
NOWHERE = 10**8


def block_causal(start: int, length: int, behind: int) -> Tensor:
    """Blocks counted from the span's start, the last one ragged."""
    ends = (torch.arange(length) // BLOCK + 1) * BLOCK
    return start + ends.clamp_max(length)


def bidirectional(start: int, length: int, behind: int) -> Tensor:
    """Everything sees everything, kept keys behind the span included."""
    return torch.full((length,), start + length + behind)


def prompt_then_blocks(start: int, length: int, behind: int) -> Tensor:
    """A prompt (all but the last 17 positions) is one block; blocks follow: D2F's fused forward."""
    prompt = max(length - 17, 0)
    seen = prompt + block_causal(0, length - prompt, 0)
    return start + torch.cat([torch.full((prompt,), prompt), seen])


def absolute_grid(start: int, length: int, behind: int) -> Tensor:
    """Blocks counted from position 0, so that the span may begin inside one."""
    ends = ((start + torch.arange(length)) // BLOCK + 1) * BLOCK
    return ends.clamp_max(start + length)


def nothing(start: int, length: int, behind: int) -> Tensor:
    """Queries without keys, as padding has."""
    return torch.zeros(length, dtype=torch.int64)


@dataclass
class Spans:
    """Shapes of a batch; see `build`."""

    lengths: Sequence[int]
    contexts: Sequence[int]
    kv_heads: int = 1
    group: int = 1
    head: int = 64
    page: int = 16
    rule: Callable[[int, int, int], Tensor] = block_causal
    behind: int = 0  # keys kept behind each span
    padding: int = 0  # tokens and requests at the end that belong to nobody
    units: int = 1  # multiprocessors; with 1 contexts are not split
    dtype: torch.dtype = torch.float32


def build(spans: Spans, seed: int = 0, device: str = "cpu") -> tuple[list, dict]:
    """Arguments of `attend_spans`, and its keyword arguments."""
    rng = torch.Generator().manual_seed(seed)
    heads, head, page = spans.kv_heads, spans.head, spans.page
    num_tokens = sum(spans.lengths) + spans.padding

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(spans.dtype)

    query = numbers(num_tokens, heads * spans.group, head)
    key, value = numbers(num_tokens, heads, head), numbers(num_tokens, heads, head)
    reach = [
        c + n + spans.behind for c, n in zip(spans.contexts, spans.lengths, strict=True)
    ]
    width = max(-(-n // page) for n in reach) + 1
    num_pages = len(reach) * width + 2
    cache = torch.full((num_pages, heads, page, 2 * head), torch.nan, dtype=spans.dtype)
    key_cache, value_cache = split_cache(cache, head)
    table = torch.full((len(reach) + spans.padding, width), NOWHERE, dtype=torch.int32)
    free = torch.randperm(num_pages, generator=rng).to(torch.int32)
    seen = []
    for r, (context, length) in enumerate(
        zip(spans.contexts, spans.lengths, strict=True)
    ):
        used = -(-reach[r] // page)
        table[r, :used], free = free[:used], free[used:]
        at = torch.cat(
            [torch.arange(context), torch.arange(context + length, reach[r])]
        )
        slots = table[r, at // page].long() * page + at % page
        store_kv_reference(
            numbers(len(at), heads, head),
            numbers(len(at), heads, head),
            *(key_cache, value_cache, slots),
        )
        seen.append(spans.rule(context, length, spans.behind))
    seen.append(torch.zeros(spans.padding, dtype=torch.int64))
    lengths = [0, *spans.lengths, *[0] * spans.padding]
    arguments = [
        *(query, key, value),
        *(
            cache,
            cache,
        ),  # split again where they arrive, so that both halves stay views of one
        torch.tensor(lengths).cumsum(0).to(torch.int32),
        torch.tensor([*spans.contexts, *[0] * spans.padding], dtype=torch.int32),
        torch.cat(seen).to(torch.int32),
        table,
        head**-0.5,
        torch.full_like(query, torch.nan),
    ]
    arguments = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    arguments[3:5] = split_cache(arguments[3], head)
    return arguments, {"max_query_len": max(spans.lengths)}


def plain(arguments: list) -> Tensor:
    """What `attend_spans` must write, one token at a time in float64; NaN where it must not."""
    (
        query,
        key,
        value,
        key_cache,
        value_cache,
        bounds,
        start,
        seen,
        table,
        scale,
        out,
    ) = arguments
    page, expected = key_cache.shape[3], torch.full_like(out, torch.nan)
    group = query.shape[1] // key.shape[1]
    for r in range(len(start)):
        low, high, first = int(bounds[r]), int(bounds[r + 1]), int(start[r])
        for token in range(low, high):
            pairs = []
            for n in range(int(seen[token])):
                if first <= n < first + high - low:
                    pairs.append((key[low + n - first], value[low + n - first]))
                else:
                    at, offset = int(table[r, n // page]), n % page
                    pairs.append(
                        (
                            key_cache[at, :, :, offset].flatten(1),
                            value_cache[at, ..., offset],
                        )
                    )
            if not pairs:
                expected[token] = 0
                continue
            keys, values = (
                torch.stack(half).double() for half in zip(*pairs, strict=True)
            )
            q = query[token].double().unflatten(0, (-1, group))
            weights = (torch.einsum("kgd,nkd->kgn", q, keys) * scale).softmax(dim=-1)
            expected[token] = torch.einsum("kgn,nkd->kgd", weights, values).flatten(
                0, 1
            )
    return expected


# How earlier kernels of this kind failed (`dllm_plugin/attention/distinct.py`), and shapes that are
# easy to get wrong. Each case compares kernels with the reference, and that with `plain`.
CASES: dict[str, Spans] = {
    "no context at all": Spans([13], [0]),
    "context is an exact multiple of the page": Spans([7, 3], [64, 32], page=32),
    "context is an exact multiple of the key tile": Spans([6], [128], page=64),
    "context ends one past a page": Spans([6], [65], page=64, head=128),
    "pages larger than a key tile": Spans([9], [300], page=256),
    "pages of 512": Spans([9, 3], [1100, 511], page=512, group=2),
    "pages of 512, half precision": Spans(
        [6], [513], page=512, units=8, dtype=torch.float16
    ),
    "large pages that no key tile divides": Spans([9], [700], page=528),
    "kept keys behind a span in pages of 512": Spans(
        [8], [500], behind=41, rule=bidirectional, page=512
    ),
    "pages smaller than a key tile": Spans([9], [150], page=16),
    "page size that is no power of two": Spans([9], [130], page=48),
    "second request's fresh keys lie at its own tokens": Spans([4, 11, 6], [21, 0, 50]),
    "every token is written": Spans([1, 2, 17], [3, 0, 19], kv_heads=2),
    "borders of each request are its own": Spans([12, 12], [5, 8], rule=absolute_grid),
    "query length that no block divides": Spans([33], [40], group=4),
    "bidirectional prompt longer than a row tile": Spans([70], [0], rule=bidirectional),
    "prompt and first blocks in one forward": Spans(
        [61, 5], [0, 33], rule=prompt_then_blocks
    ),
    "seven query heads per KV head": Spans([32], [45], group=7),
    "seven query heads, head size 128": Spans(
        [5, 1], [37, 80], group=7, head=128, page=32
    ),
    "three KV heads": Spans([6], [18], kv_heads=3, group=2),
    "eight query heads per KV head": Spans([3], [17], group=8, head=32),
    "one query": Spans([1, 1, 1], [0, 1, 100], group=4),
    "nothing stored: pages hold NaN around the span": Spans([20], [10], page=64),
    "kept keys behind the span": Spans([8, 5], [30, 70], behind=41, rule=bidirectional),
    "kept keys behind a span inside one page": Spans(
        [3], [5], behind=7, rule=bidirectional, page=64
    ),
    "kept keys behind a span that starts at 0": Spans(
        [9], [0], behind=90, rule=bidirectional
    ),
    "queries that see nothing": Spans([4, 4], [0, 9], rule=nothing),
    "one long request among short ones": Spans(
        [70, 1, 2, 0, 3], [0, 9, 40, 7, 16], padding=2
    ),
    "a request without tokens between others": Spans([5, 0, 6], [7, 0, 20]),
    "padded tokens and requests": Spans([5, 8], [16, 33], padding=3),
    "long context in splits": Spans([4], [700], group=7, units=16),
    "splits without keys": Spans([5, 2], [40, 530], page=32, units=64),
    "splits, keys kept behind the span": Spans(
        [6], [300], behind=300, rule=bidirectional, units=8
    ),
    "splits, padded tokens": Spans([5], [300], padding=4, units=8),
    "half precision": Spans([11], [77], group=4, head=128, dtype=torch.float16),
    "half precision, small pages, splits": Spans(
        [6], [400], page=16, units=8, dtype=torch.float16
    ),
}
