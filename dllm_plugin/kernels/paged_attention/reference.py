"""Attend to spans on the `distinct` KV layout: the plain-torch reference implementation.

It is what CPUs run. :mod:`dllm_plugin.kernels.paged_store` describes the layout. Shape
letters here and in in `kernel`: T tokens of the forward, R requests, H query heads,
G query heads per KV head, K KV heads, D head size, N tokens of a page, P pages, W width of the
block table, L longest list of keys.
"""

import torch
from torch import Tensor


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
    """Attend to spans: each request computes the positions ``[start, start + length)``.

    Token t sees the keys ``[0, keys_seen[t])`` of its request. Keys of the span itself are taken
    from `key` and `value`, all others from the cache, before the span and after it; a token that
    sees nothing gets zeros. One integer per token so describes a bidirectional prompt, blocks that
    are causal among themselves (D2F paper, arXiv 2508.09192, section 4) and keys kept after the
    span.

    Args:
        query: ``[T, H, D]``; key, value ``[T, K, D]``.
        query_start_loc: int32 ``[R + 1]``, where each request's tokens begin.
        span_start: int32 ``[R]``, absolute position of each request's first token.
        keys_seen: int32 ``[T]``.
        block_table: int32 ``[R, W]``, pages of each request; entries past its keys are unread.
        out: ``[T, H, D]``; tokens of no request are left as they are.
        max_query_len: upper bound on the tokens of a request.
    """
    num_tokens = int(query_start_loc[-1])
    if num_tokens == 0:
        return
    token_T = torch.arange(num_tokens, device=query.device)
    request_T = torch.searchsorted(
        query_start_loc[1:], token_T.to(torch.int32), right=True
    )
    local_T = token_T - query_start_loc[request_T]
    longest_R = keys_seen.new_zeros(len(span_start))
    longest_R.scatter_reduce_(0, request_T, keys_seen[:num_tokens], "amax")
    keys_RLKD, values_RLKD = _gather(key_cache, value_cache, block_table, longest_R)
    position_T = span_start[request_T] + local_T
    # Keys that nobody sees have no place in the tensors.
    inside_T = position_T < keys_RLKD.shape[1]
    fresh = request_T[inside_T], position_T[inside_T]
    keys_RLKD[fresh] = key[:num_tokens][inside_T].float()
    values_RLKD[fresh] = value[:num_tokens][inside_T].float()

    requests, kv_heads = len(span_start), key.shape[1]
    shape = (requests, max_query_len, kv_heads, -1, query.shape[2])
    query_RQKGD = query.new_zeros(
        requests, max_query_len, *query.shape[1:], dtype=torch.float32
    )
    query_RQKGD[request_T, local_T] = query[:num_tokens].float()
    seen_RQ = keys_seen.new_zeros(requests, max_query_len)
    seen_RQ[request_T, local_T] = keys_seen[:num_tokens]
    scores = (
        torch.einsum("rqkgd,rlkd->rkgql", query_RQKGD.view(shape), keys_RLKD) * scale
    )
    hidden_RQL = (
        torch.arange(scores.shape[-1], device=query.device) >= seen_RQ[..., None]
    )
    weights = scores.masked_fill(hidden_RQL[:, None, None], -torch.inf).softmax(dim=-1)
    # The softmax of a query that sees nothing is 0 / 0.
    weights = weights.masked_fill(hidden_RQL[:, None, None], 0)
    result = torch.einsum("rkgql,rlkd->rqkgd", weights, values_RLKD).flatten(2, 3)
    out[:num_tokens] = result[request_T, local_T].to(out.dtype)


def _gather(
    key_cache: Tensor, value_cache: Tensor, block_table: Tensor, longest_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Gather every request's cached keys and values by position: ``[R, L, K, D]`` float32.

    What nobody sees becomes zero: it meets weights of zero, and zero times NaN is NaN.
    """
    page = key_cache.shape[3]
    used = (
        block_table[:, : -(-int(longest_R.max()) // page)]
        .long()
        .clamp(0, len(key_cache) - 1)
    )
    keys = key_cache[used].permute(0, 1, 4, 2, 3, 5).flatten(4, 5).flatten(1, 2)
    values = value_cache[used].permute(0, 1, 4, 2, 3).flatten(1, 2)
    unseen_RL = torch.arange(keys.shape[1], device=keys.device) >= longest_R[:, None]
    unseen = unseen_RL[:, :, None, None]
    return keys.float().masked_fill_(unseen, 0), values.float().masked_fill_(unseen, 0)
