"""The `distinct` KV layout in plain torch: stores and span attention. Twins of the Triton kernels.

Shape letters here and in the kernels beside this file: T tokens of the pass, R requests,
H query heads, G query heads per KV head, K KV heads, D head size, N tokens of a page, P pages,
W width of the block table, L longest row of keys.

Keys lie as ``[P, K, D/x, N, x]`` with x = 16 bytes, values as ``[P, K, D, N]``: the layout of the
first paged attention kernels (vLLM, SOSP 2023) that D2F-vLLM calls `distinct`. Both halves of one
KV head share the page's memory, so a page is still ``[K, N, 2 * D]`` numbers in one piece, and
whatever copies, shares or frees whole pages of vLLM's cache works on this one too.
"""

import torch
from torch import Tensor

PIECE_BYTES = 16  # the widest load of one GPU thread


def split_cache(cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Views of keys and values in vLLM's cache of one layer.

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
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write keys and values ``[T, K, D]`` to their slots; a slot of -1 is not stored."""
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[kept]
    page, offset = slots // key_cache.shape[3], slots % key_cache.shape[3]
    pieces = key[kept].unflatten(2, (-1, key_cache.shape[4]))
    key_cache[page, :, :, offset] = pieces.to(key_cache.dtype)
    value_cache[page, :, :, offset] = value[kept].to(value_cache.dtype)


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
) -> None:
    """Attention of spans: requests that compute the positions ``[start, start + length)``.

    Token t sees the keys ``[0, keys_seen[t])`` of its request. Keys of the span itself are taken
    from `key` and `value`, all others from the cache; a token that sees nothing gets zeros. That
    covers a bidirectional prompt, blocks that are causal among themselves (D2F paper,
    arXiv 2508.09192, section 4) and keys kept behind the span, with integers alone.

    Args:
        query: ``[T, H, D]``; key, value ``[T, K, D]``.
        query_start_loc: int32 ``[R + 1]``, where each request's tokens begin.
        span_start: int32 ``[R]``, absolute position of each request's first token.
        keys_seen: int32 ``[T]``.
        block_table: int32 ``[R, W]``, pages of each request; entries past its keys are unread.
        out: ``[T, H, D]``; rows of no request are left alone.
        max_query_len: no request has more tokens.
    """
    num_tokens = int(query_start_loc[-1])
    if num_tokens == 0:
        return
    token_T = torch.arange(num_tokens, device=query.device)
    request_T = torch.searchsorted(query_start_loc[1:], token_T.to(torch.int32), right=True)
    local_T = token_T - query_start_loc[request_T]
    longest_R = keys_seen.new_zeros(len(span_start))
    longest_R.scatter_reduce_(0, request_T, keys_seen[:num_tokens], "amax")
    keys_RLKD, values_RLKD = _gather(key_cache, value_cache, block_table, longest_R)
    position_T = span_start[request_T] + local_T
    inside_T = position_T < keys_RLKD.shape[1]  # keys that nobody sees need no room
    fresh = request_T[inside_T], position_T[inside_T]
    keys_RLKD[fresh] = key[:num_tokens][inside_T].float()
    values_RLKD[fresh] = value[:num_tokens][inside_T].float()

    requests, kv_heads = len(span_start), key.shape[1]
    shape = (requests, max_query_len, kv_heads, -1, query.shape[2])
    query_RQKGD = query.new_zeros(requests, max_query_len, *query.shape[1:], dtype=torch.float32)
    query_RQKGD[request_T, local_T] = query[:num_tokens].float()
    seen_RQ = keys_seen.new_zeros(requests, max_query_len)
    seen_RQ[request_T, local_T] = keys_seen[:num_tokens]
    scores = torch.einsum("rqkgd,rlkd->rkgql", query_RQKGD.view(shape), keys_RLKD) * scale
    hidden_RQL = torch.arange(scores.shape[-1], device=query.device) >= seen_RQ[..., None]
    weights = scores.masked_fill(hidden_RQL[:, None, None], -torch.inf).softmax(dim=-1)
    # A row that sees nothing is 0 / 0.
    weights = weights.masked_fill(hidden_RQL[:, None, None], 0)
    result = torch.einsum("rkgql,rlkd->rqkgd", weights, values_RLKD).flatten(2, 3)
    out[:num_tokens] = result[request_T, local_T].to(out.dtype)


def _gather(
    key_cache: Tensor, value_cache: Tensor, block_table: Tensor, longest_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Cached keys and values of every request in the order of positions: ``[R, L, K, D]`` fp32.

    What nobody sees counts as zero: it meets weights of zero, and zero times NaN is NaN.
    """
    page = key_cache.shape[3]
    used = block_table[:, : -(-int(longest_R.max()) // page)].long().clamp(0, len(key_cache) - 1)
    keys = key_cache[used].permute(0, 1, 4, 2, 3, 5).flatten(4, 5).flatten(1, 2)
    values = value_cache[used].permute(0, 1, 4, 2, 3).flatten(1, 2)
    unseen_RL = torch.arange(keys.shape[1], device=keys.device) >= longest_R[:, None]
    unseen = unseen_RL[:, :, None, None]
    return keys.float().masked_fill_(unseen, 0), values.float().masked_fill_(unseen, 0)
