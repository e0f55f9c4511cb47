"""Scan some columns of the rows and merge the partials: the plain-torch reference implementation.

With tensor parallelism each rank scans its own columns, and all ranks merge the same partials in
the same order, so that they decide alike. A partial is what some columns of a row contribute to its
softmax and its token: K float64 numbers. Logarithms are to base 2; logits are divided by the
temperature where the confidence is.

- the score by which its token won, and the token; NaN, and the first token that has it
- the logit of that token, the largest logit, and the sum of ``2 ** (logit - largest)``
- with `want_ranking` the second largest logit, and the sum of ``2 ** gap * gap``, where gap is the
  logit minus the largest logit

Equal to :func:`dllm_plugin.kernels.confidence.reference.propose_rows` in tokens, and in
confidence and margin up to rounding; entropy is ``sum p ln p`` here. Shape letters as in
:mod:`dllm_plugin.kernels.confidence.kernel`.
"""

import math

import torch
from torch import Tensor

from . import reference

LOWEST = -1e30  # finite: -inf minus -inf is no number
NONE_ABOVE = -1e20  # below any logit by any temperature, and above LOWEST by any


def scan_rows(rows: reference.Reading, columns: reference.Columns) -> Tensor:
    """Compute one partial of each row, float64 ``[K, T, 1]``, from the columns that are here.

    The bias table is that of the whole vocabulary. `divide` and `token_T` need all columns, and
    have their defaults here.
    """
    slot_T = rows.slot_T
    mask_id = rows.mask_id
    bias = rows.bias
    sampling, logits_TV = rows.sampling, rows.in_float32()
    first, width = columns.first, logits_TV.shape[1]
    inside = min(max(columns.vocab_size - first, 0), width)
    if bias is not None:
        reference.add_bias(logits_TV[:, :inside], bias, slot_T, first)
    logits_TV[:, inside:] = reference.NEGATIVE_INFINITY
    if first <= mask_id < first + width:
        logits_TV[:, mask_id - first] = reference.NEGATIVE_INFINITY
    hot = None if sampling is None else reference.hot_rows(logits_TV, slot_T, sampling)
    column_T, best_T = reference.choose(logits_TV, hot, slot_T, sampling, first)
    if hot is not None and rows.temper:
        logits_TV.index_copy_(0, *hot)
    top_T1 = logits_TV.amax(dim=-1, keepdim=True).clamp_min(LOWEST)
    if bias is not None:
        top_T1 = torch.maximum(top_T1, reference.lowest(bias, slot_T, LOWEST)[:, None])
    share_TV = (logits_TV - top_T1).exp()
    x_T1 = logits_TV.gather(1, column_T[:, None])
    numbers = [
        best_T,
        column_T + first,
        *(_to_log2(x) for x in (x_T1, top_T1)),
        share_TV.sum(-1),
    ]
    if rows.want_ranking:
        two_T2 = logits_TV.topk(min(2, width), dim=-1).values
        second_T = torch.nn.functional.pad(two_T2, (0, 1), value=LOWEST)[
            :, 1
        ].clamp_min(LOWEST)
        weight_T = torch.xlogy(share_TV, share_TV).sum(-1)
        numbers += [_to_log2(second_T), _to_log2(weight_T)]
    return torch.stack([x.to(torch.float64).reshape(-1, 1) for x in numbers])


def merge_rows(
    partials_SKTP: Tensor, want_ranking: bool = False, num_rows: int | None = None
) -> reference.RowStats:
    """Merge the partials of all shards, which are in the order of their columns."""
    best, token, x, top, mass, *ranking = partials_SKTP.permute(1, 2, 0, 3).flatten(2)
    winner_T1 = best.argmax(dim=-1, keepdim=True)
    highest_T1, top_lane_T1 = top.max(dim=-1, keepdim=True)
    gap = top - highest_T1
    factor = gap.exp2()
    total_T = (mass * factor).sum(-1)
    won_T1 = x.gather(1, winner_T1)
    share_T = (won_T1 - highest_T1).exp2().squeeze(1)
    token_T = token.gather(1, winner_T1).squeeze(1).to(torch.int64)
    confidence_T = (share_T / total_T).to(torch.float32)
    largest_T1 = torch.where(
        highest_T1 < NONE_ABOVE, reference.NEGATIVE_INFINITY, highest_T1
    )
    broken_T = reference.is_broken(won_T1.squeeze(1), largest_T1.squeeze(1))
    stats = reference.RowStats(token_T, confidence_T, broken_T)
    if want_ranking:
        second, weight = ranking
        entropy_T = ((weight + gap * mass) * factor).sum(-1) / total_T - total_T.log2()
        others = torch.maximum(
            second, top.scatter(1, top_lane_T1, reference.NEGATIVE_INFINITY)
        ).amax(-1)
        margin_T = (1 - (others - highest_T1.squeeze(1)).exp2()) / total_T
        pair = [x.to(torch.float32) for x in (entropy_T * math.log(2), margin_T)]
        stats = reference.RowStats(*stats[:3], *pair)
    return reference.with_missing(stats, num_rows)


def _to_log2(value: Tensor) -> Tensor:
    return value.to(torch.float64) / math.log(2)
