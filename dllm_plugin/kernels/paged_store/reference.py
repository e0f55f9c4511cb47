"""Store keys and values in the `distinct` KV layout: the plain-torch reference implementation.

Keys lie as ``[P, K, D/x, N, x]`` with x = 16 bytes, values as ``[P, K, D, N]``: the layout of the
first paged attention kernels (vLLM, SOSP 2023) that D2F-vLLM calls `distinct`. Keys and values of
one KV head share the page's memory, so a page is still ``[K, N, 2 * D]`` numbers in one piece, and
whatever copies, shares or frees whole pages of vLLM's cache works on this one too.

Shape letters: T tokens of the forward, K KV heads, D head size, N tokens of a page, P pages.
"""

from torch import Tensor

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


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Store keys and values ``[T, K, D]`` in their slots; a slot of -1 is not stored."""
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[kept]
    page, offset = slots // key_cache.shape[3], slots % key_cache.shape[3]
    pieces = key[kept].unflatten(2, (-1, key_cache.shape[4]))
    key_cache[page, :, :, offset] = pieces.to(key_cache.dtype)
    value_cache[page, :, :, offset] = value[kept].to(value_cache.dtype)
