"""Rotate queries and keys, store keys and values: the plain-torch reference implementation.

The cache has vLLM's own layout. Shape letters: T tokens of the forward, H query heads, K KV heads,
D head size, N tokens of a page, P pages, M positions of the table.
"""

import torch
from torch import Tensor


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
) -> None:
    """Rotate queries and keys by halves, and store keys and values.

    The rotation is RoFormer's (eq. 34) in GPT-NeoX's order of elements.

    Args:
        query: ``[T, H, D]``; key, value: ``[T, K, D]``; they are not changed.
        position_T: int64.
        table_MD: cosines of a position's D / 2 angles, then their sines, as vLLM has them.
        cache: ``[P, K, N, 2 * D]``, keys before values.
        slot_T: int64, token of the cache; -1 is not stored. May be shorter than T: the rest is not
            stored either.
        query_out, key_out: receive the rotated queries and keys; None: keys are only stored.
    """
    cos, sin = table_MD[position_T].to(query.dtype).float()[:, None].chunk(2, dim=-1)
    rotated_query, rotated_key = (_rotate(x, cos, sin) for x in (query, key))
    kept = (slot_T >= 0).nonzero()[:, 0]
    page, offset = slot_T[kept] // cache.shape[2], slot_T[kept] % cache.shape[2]
    both = torch.cat([rotated_key[kept], value[kept]], dim=-1)
    cache[page, :, offset] = both.to(cache.dtype)
    query_out.copy_(rotated_query)
    if key_out is not None:
        key_out.copy_(rotated_key)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(
        x.dtype
    )
