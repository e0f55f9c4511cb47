"""Attend to spans on the `distinct` KV layout: the Triton kernel, fused and split.

One program owns ROWS rows; a row is one query head of one token. All heads that share a KV head lie
together, so with 7 heads per KV head one row in 64 is wasted, and not one in 8. A program walks
over the keys that its rows see with one online softmax in fp32: first the cached ones, page by page
around the span, then the span's own, which are read from this forward's tensors and never from the
cache. What is visible follows only from ``keys_seen``; tiles that every row sees whole are not
masked.

With few rows and long contexts the key tiles of one row block are divided among SPLITS programs,
whose partials are merged by their log-sum-exp. The launch grid depends on the numbers of tokens and
requests, not on lengths, which stay on the device: a captured graph serves every batch of its size,
and programs without work return at once.
"""

# Kernels have no Python types to annotate.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import NamedTuple

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from .span_kernel import span_kernel

LOG2_E = 1.4426950408889634
MAX_SPLITS = 16
MIN_TILES = 4  # key tiles that are worth a program of their own
PROGRAMS_PER_SM = 2
LOOKUP = 256  # requests looked through at once


class Tile(NamedTuple):
    """Name the launch constants: rows and keys of a tile, warps, stages of the load pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# Smallest first. Below 64 rows Hopper's warp-group GEMMs do not apply; at 128 rows keys are read
# half as often. Stages count the read of the page number, which runs ahead of the keys: 3 stages
# fit two tiles of 64 keys, at head size 128 in 16 bits 64 KiB, so that two programs fit one
# multiprocessor; with 128 rows the registers allow only one program, and it gets three tiles.
TILES_16 = (
    Tile(16, 64, 4, 3),
    Tile(32, 64, 4, 3),
    Tile(64, 64, 4, 3),
    Tile(128, 64, 8, 4),
)
TILES_32 = (Tile(16, 32, 4, 2), Tile(32, 32, 8, 2))


@triton.jit(do_not_specialize=["num_requests"])
def merge_kernel(
    partial_ptr,
    lse_ptr,
    query_start_loc_ptr,
    out_ptr,
    num_requests,
    split_stride,
    out_stride,
    HEAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the partials of one head of one token per program."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if token >= tl.load(query_start_loc_ptr + num_requests):
        return
    place = token * tl.num_programs(1) + head
    split = tl.arange(0, SPLITS).to(tl.int64)
    d = tl.arange(0, HEAD)
    lse = tl.load(lse_ptr + split * split_stride + place)
    most = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(most == float("-inf"), 0.0, most))
    rows = partial_ptr + (split * split_stride + place)[:, None] * HEAD + d[None, :]
    # Partials of splits without keys were never written.
    partials = tl.load(rows, mask=(weights > 0)[:, None], other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(partials * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(
        out_ptr + token * out_stride + head * HEAD + d,
        result.to(out_ptr.dtype.element_ty),
    )


def choose_tile(num_rows: int, itemsize: int) -> Tile:
    """Return the smallest tile with room for a request's rows, or the largest there is."""
    tiles = TILES_32 if itemsize == 4 else TILES_16
    return next((tile for tile in tiles if num_rows <= tile.rows), tiles[-1])


def choose_splits(num_programs: int, num_units: int) -> int:
    """Return the power of two that fills the device without a second wave of programs."""
    wanted = PROGRAMS_PER_SM * num_units // num_programs
    return 1 << min(max(wanted, 1), MAX_SPLITS).bit_length() - 1


def attend_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    span_start: Tensor,
    keys_seen: Tensor,
    block_table: Tensor,
    scale: float,
    out: Tensor,
    max_query_len: int,
    num_units: int = 132,
    tile: Tile | None = None,
    splits: int | None = None,
) -> None:
    """Attend as the reference does; pages are multiples of 16, heads powers of two from 16 on.

    Args:
        num_units: multiprocessors of the device; long contexts are split to fill them.
        tile, splits: other launch constants than those chosen here, to measure them.
    """
    num_tokens, num_heads, head_size = query.shape
    requests, kv_heads, page = len(span_start), key.shape[1], key_cache.shape[3]
    assert page % 16 == 0 and query.stride()[1:] == key.stride()[1:] == (head_size, 1)
    assert value.stride()[1:] == out.stride()[1:] == (head_size, 1)
    group = num_heads // kv_heads
    tile = tile or choose_tile(max_query_len * group, query.element_size())
    # As many row blocks for each request as the longest needs, unless most would be empty.
    per_request = triton.cdiv(max_query_len * group, tile.rows)
    blocks = num_tokens * group // tile.rows + requests
    per_request = per_request if requests * per_request <= blocks else 0
    blocks = requests * per_request or blocks
    splits = splits or choose_splits(blocks * kv_heads, num_units)
    partial, lse = out, out
    if splits > 1:
        partial = out.new_empty(
            splits, num_tokens, num_heads, head_size, dtype=torch.float32
        )
        lse = partial.new_empty(partial.shape[:-1])
    span_kernel[(blocks, kv_heads, splits)](
        query,
        key,
        value,
        key_cache,
        value_cache,
        query_start_loc,
        span_start,
        keys_seen,
        block_table,
        partial,
        lse,
        scale * LOG2_E,
        requests,
        per_request,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        partial.stride(-3),
        num_tokens * num_heads,
        block_table.stride(0),
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        GROUP=group,
        HEAD=head_size,
        PAGE=page,
        PIECE=key_cache.shape[4],
        ROWS=tile.rows,
        KEYS=tile.keys,
        SPLITS=splits,
        LOOKUP=LOOKUP,
        MIN_TILES=MIN_TILES,
        STAGES=tile.stages,
        DOT="ieee" if query.element_size() == 4 else "tf32",
        num_warps=tile.warps,
    )
    if splits > 1:
        merge_kernel[(num_tokens, num_heads)](
            partial,
            lse,
            query_start_loc,
            out,
            requests,
            num_tokens * num_heads,
            out.stride(0),
            HEAD=head_size,
            SPLITS=splits,
            num_warps=2,
        )
