"""Rotate queries and keys, store keys and values: a Triton kernel, and its plain-torch reference.

One launch per layer: vLLM needs two, or three if the compiler rotates queries and keys
separately. At few positions a launch takes 2 us and the gap before it 0.4 us, whatever it moves.

With scales, queries, keys and values become float8 (e4m3): rounded to the model's dtype first, then
scaled, limited to the largest float8 and rounded to even, so that the cache has the bytes that
vLLM's `reshape_and_cache_flash` writes.

The cache has vLLM's own layout. Shape letters: T tokens of the forward, H query heads, K KV heads,
D head size, N tokens of a page, P pages, M positions of the table.
"""

# Kernels have no Python types to annotate.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

HEADS_AT_ONCE = 8
FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


@triton.jit
def to_float8(x):
    """Convert float32 to the nearest float8, ties to even; NaN stays NaN."""
    x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["num_slots"])
def rotate_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    query_stride,
    key_stride,
    value_stride,
    position_ptr,
    table_ptr,
    slot_ptr,
    num_slots,
    cache_ptr,
    page_stride,
    head_stride,
    token_stride,
    query_out_ptr,
    key_out_ptr,
    query_scale_ptr,
    key_scale_ptr,
    value_scale_ptr,
    PER_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    QUERY_TILES: tl.constexpr,
):
    """Handle one token per program, and TILE query heads or TILE heads of keys and values."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, LANES)[None, :]
    inside = d < HALF
    position = tl.load(position_ptr + token)
    angles = table_ptr + position * 2 * HALF + d
    # Products are rounded once, from what the model's type makes of the table.
    dtype = query_ptr.dtype.element_ty
    cos = tl.load(angles, mask=inside).to(dtype).to(tl.float32)
    sin = tl.load(angles + HALF, mask=inside).to(dtype).to(tl.float32)
    if tile < QUERY_TILES:
        head = tile * TILE + tl.arange(0, TILE)[:, None]
        mask = (head < HEADS) & inside
        row = query_ptr + token * query_stride + head * 2 * HALF + d
        low = tl.load(row, mask=mask).to(tl.float32)
        high = tl.load(row + HALF, mask=mask).to(tl.float32)
        rotated_low = low * cos - high * sin
        rotated_high = high * cos + low * sin
        if query_scale_ptr is not None:
            query_scale_at = query_scale_ptr + head // (HEADS // KV_HEADS) * PER_HEAD
            query_scale = tl.load(query_scale_at, mask=head < HEADS, other=1.0)
            # vLLM multiplies queries by the inverse, but divides keys and values.
            inverse = tl.div_rn(1.0, query_scale)
            rotated_low = to_float8(rotated_low.to(dtype).to(tl.float32) * inverse)
            rotated_high = to_float8(rotated_high.to(dtype).to(tl.float32) * inverse)
        out = query_out_ptr + (token * HEADS + head) * 2 * HALF + d
        tl.store(out, rotated_low, mask=mask)
        tl.store(out + HALF, rotated_high, mask=mask)
    else:
        head = (tile - QUERY_TILES) * TILE + tl.arange(0, TILE)[:, None]
        mask = (head < KV_HEADS) & inside
        row = key_ptr + token * key_stride + head * 2 * HALF + d
        low = tl.load(row, mask=mask).to(tl.float32)
        high = tl.load(row + HALF, mask=mask).to(tl.float32)
        rotated_low = low * cos - high * sin
        rotated_high = high * cos + low * sin
        if key_scale_ptr is not None:
            scale_at = key_scale_ptr + head * PER_HEAD
            real = head < KV_HEADS
            key_scale = tl.load(scale_at, mask=real, other=1.0)
            rounded_low = rotated_low.to(dtype).to(tl.float32)
            rounded_high = rotated_high.to(dtype).to(tl.float32)
            rotated_low = to_float8(tl.div_rn(rounded_low, key_scale))
            rotated_high = to_float8(tl.div_rn(rounded_high, key_scale))
        if key_out_ptr is not None:
            out = key_out_ptr + (token * KV_HEADS + head) * 2 * HALF + d
            tl.store(out, rotated_low, mask=mask)
            tl.store(out + HALF, rotated_high, mask=mask)
        slot = tl.load(slot_ptr + token, mask=token < num_slots, other=-1).to(tl.int64)
        stored = mask & (slot + tl.zeros_like(head) >= 0)
        place = cache_ptr + slot // PAGE * page_stride + slot % PAGE * token_stride
        place += head.to(tl.int64) * head_stride + d
        tl.store(place, rotated_low, mask=stored)
        tl.store(place + HALF, rotated_high, mask=stored)
        row = value_ptr + token * value_stride + head * 2 * HALF + d
        value_low = tl.load(row, mask=stored)
        value_high = tl.load(row + HALF, mask=stored)
        if value_scale_ptr is not None:
            scale_at = value_scale_ptr + head * PER_HEAD
            real = head < KV_HEADS
            value_scale = tl.load(scale_at, mask=real, other=1.0)
            value_low = to_float8(tl.div_rn(value_low.to(tl.float32), value_scale))
            value_high = to_float8(tl.div_rn(value_high.to(tl.float32), value_scale))
        tl.store(place + 2 * HALF, value_low, mask=stored)
        tl.store(place + 3 * HALF, value_high, mask=stored)


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_T: Tensor,
    table_MD: Tensor,
    cache: Tensor,
    slot_T: Tensor,
    query_out: Tensor,
    key_out: Tensor | None,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Rotate and store as the reference does; the cache's last axis must be dense."""
    num_tokens, heads, head = query.shape
    kv_heads, half = key.shape[1], head // 2
    for x in (query, key, value):
        assert x.stride()[1:] == (head, 1), "heads must lie one after the other"
    assert cache.stride(3) == 1 and cache.shape[3] == 2 * head
    for out in (query_out, key_out):
        assert out is None or out.is_contiguous()
    per_head = False
    if scales is not None:
        cache = cache.view(FLOAT8)
        per_head = scales[1].numel() > 1
    query_tiles, tiles = (triton.cdiv(n, HEADS_AT_ONCE) for n in (heads, kv_heads))
    if num_tokens:
        rotate_kernel[(num_tokens, query_tiles + tiles)](
            query,
            key,
            value,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            position_T,
            table_MD,
            slot_T,
            slot_T.shape[0],
            cache,
            *cache.stride()[:3],
            query_out,
            key_out,
            *(scales or (None, None, None)),
            PER_HEAD=per_head,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=half,
            LANES=triton.next_power_of_2(half),
            PAGE=cache.shape[2],
            TILE=HEADS_AT_ONCE,
            QUERY_TILES=query_tiles,
            num_warps=4,
        )


def rotate_and_store_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_T: Tensor,
    table_MD: Tensor,
    cache: Tensor,
    slot_T: Tensor,
    query_out: Tensor,
    key_out: Tensor | None,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Rotate queries and keys by halves, and store keys and values.

    The rotation is RoFormer's (eq. 34) in GPT-NeoX's order of elements.

    Args:
        query: ``[T, H, D]``; key, value: ``[T, K, D]``; they are not changed.
        position_T: int64.
        table_MD: cosines of a position's D / 2 angles, then their sines, as vLLM has them.
        cache: ``[P, K, N, 2 * D]``, keys before values; with scales float8 or its bytes.
        slot_T: int64, token of the cache; -1 is not stored. May be shorter than T: the rest is not
            stored either.
        query_out, key_out: receive the rotated queries and keys, of the cache's type; None: keys
            are only stored.
        scales: float32 scales of queries, keys and values, one number or ``[K]``; None: nothing is
            converted to float8.
    """
    cos, sin = table_MD[position_T].to(query.dtype).float()[:, None].chunk(2, dim=-1)
    rotated_query = _rotate(query, cos, sin)
    rotated_key = _rotate(key, cos, sin)
    if scales is not None:
        query_scale, key_scale, value_scale = (scale.view(-1, 1) for scale in scales)
        if len(query_scale) > 1:
            heads_per_key = query.shape[1] // key.shape[1]
            query_scale = query_scale.repeat_interleave(heads_per_key, dim=0)
        rotated_query = _to_float8(rotated_query.float() * query_scale.reciprocal())
        rotated_key = _to_float8(rotated_key.float() / key_scale)
        value = _to_float8(value.float() / value_scale)
        cache = cache.view(FLOAT8)
    kept = (slot_T >= 0).nonzero()[:, 0]
    page = slot_T[kept] // cache.shape[2]
    offset = slot_T[kept] % cache.shape[2]
    both = torch.cat([rotated_key[kept], value[kept]], dim=-1)
    cache[page, :, offset] = both.to(cache.dtype)
    query_out.copy_(rotated_query)
    if key_out is not None:
        key_out.copy_(rotated_key)


def _to_float8(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(FLOAT8)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(
        x.dtype
    )
