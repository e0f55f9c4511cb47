"""Store keys and values in the `distinct` KV layout: the Triton kernel.

A program moves TOKENS tokens of one KV head. Keys are written in pieces of 16 bytes. Values are
transposed on the way, so that the threads of a warp run along tokens, whose slots are mostly
adjacent. Along the head, whose elements lie a page apart, every 2-byte value would be a memory
transaction of its own.
"""

# Kernels have no Python types to annotate.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from torch import Tensor
from vllm.triton_utils import tl, triton

TOKENS = 32


@triton.jit(do_not_specialize=["num_tokens"])
def store_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    num_tokens,
    key_stride,
    value_stride,
    key_page_stride,
    key_head_stride,
    value_page_stride,
    value_head_stride,
    PAGE: tl.constexpr,
    HEAD: tl.constexpr,
    PIECE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Store TOKENS tokens of one KV head per program; a slot below 0 is left out."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(
        tl.int64
    )
    kept = slot >= 0
    page, offset = slot // PAGE, slot % PAGE
    token = token.to(tl.int64)
    d = tl.arange(0, HEAD)

    rows = key_ptr + head * HEAD + token[:, None] * key_stride + d[None, :]
    key = tl.load(rows, mask=kept[:, None])
    place = page * key_page_stride + head * key_head_stride + offset * PIECE
    within = (d // PIECE) * (PAGE * PIECE) + d % PIECE
    tl.store(key_cache_ptr + place[:, None] + within[None, :], key, mask=kept[:, None])

    rows = value_ptr + head * HEAD + token[:, None] * value_stride + d[None, :]
    value = tl.load(rows, mask=kept[:, None])
    # In one dimension the compiler cannot choose to run along the head.
    value = tl.reshape(tl.trans(value), (HEAD * TOKENS,))
    i = tl.arange(0, HEAD * TOKENS)
    token, d = tl.program_id(0) * TOKENS + i % TOKENS, i // TOKENS
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(
        tl.int64
    )
    place = (
        slot // PAGE * value_page_stride
        + head * value_head_stride
        + d * PAGE
        + slot % PAGE
    )
    tl.store(value_cache_ptr + place, value, mask=slot >= 0)


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Store as the reference does: keys and values ``[T, K, D]``; a slot of -1 is not stored."""
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    assert key.stride()[1:] == value.stride()[1:] == (key.shape[2], 1)
    store_kernel[(triton.cdiv(num_tokens, TOKENS), key.shape[1])](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        num_tokens,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        PAGE=key_cache.shape[3],
        HEAD=key.shape[2],
        PIECE=key_cache.shape[4],
        TOKENS=TOKENS,
        num_warps=4,
    )
