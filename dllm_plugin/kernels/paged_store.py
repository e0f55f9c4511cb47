"""Store keys and values in the `distinct` KV layout: Triton kernel and plain-torch reference.

Keys lie as ``[P, K, D/x, N, x]`` with x = 16 bytes, values as ``[P, K, D, N]``: the layout of the
first paged attention kernels (vLLM, SOSP 2023) that D2F-vLLM calls `distinct`. Keys and values of
one KV head share the page's memory, so a page is still ``[K, N, 2 * D]`` numbers in one piece, and
whatever copies, shares or frees whole pages of vLLM's cache works on this one too.

A program of the kernel moves TOKENS tokens of one KV head. Keys are written in pieces of 16 bytes.
Values are transposed on the way, so that the threads of a warp run along tokens, whose slots are
mostly adjacent. Along the head, whose elements lie a page apart, every 2-byte value would be a
memory transaction of its own.

Shape letters: T tokens of the forward, K KV heads, D head size, N tokens of a page, P pages.
"""

# Kernels have no Python types to annotate.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from torch import Tensor
from vllm.triton_utils import tl, triton

TOKENS = 32
PIECE_BYTES = 16  # the widest load of one GPU thread


def split_cache(cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Return views of the keys and the values in vLLM's cache of one layer.

    Args:
        cache: ``[P, K, N, 2 * D]`` with contiguous ``[N, 2 * D]``, as vLLM allocates it.
    Returns:
        keys ``[P, K, D/x, N, x]`` and values ``[P, K, D, N]``.
    """
    pages, heads, page, _ = cache.shape
    piece = PIECE_BYTES // cache.element_size()
    halves = cache.view(pages, heads, 2, page * head_size)
    keys = halves[:, :, 0].view(pages, heads, head_size // piece, page, piece)
    return keys, halves[:, :, 1].view(pages, heads, head_size, page)


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
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        PAGE=key_cache.shape[3],
        HEAD=key.shape[2],
        PIECE=key_cache.shape[4],
        TOKENS=TOKENS,
        num_warps=4,
    )


def store_kv_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Store keys and values ``[T, K, D]`` in their slots; a slot of -1 is not stored."""
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[kept]
    page = slots // key_cache.shape[3]
    offset = slots % key_cache.shape[3]
    pieces = key[kept].unflatten(2, (-1, key_cache.shape[4]))
    key_cache[page, :, :, offset] = pieces.to(key_cache.dtype)
    value_cache[page, :, :, offset] = value[kept].to(value_cache.dtype)
