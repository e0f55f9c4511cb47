"""Plain-torch forms of the step's device work; the CPU path, and the truth for other kernels.

Shape letters as in :mod:`dllm_plugin.plan`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed 64-bit number
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15


class RowStats(NamedTuple):
    """Per logits row: the proposed token and how sure the model is.

    token_T int64; confidence_T, score_T float32 (see :class:`dllm_plugin.plan.Proposal`).
    """

    token_T: Tensor
    confidence_T: Tensor
    score_T: Tensor


def per_block(mask_RC: Tensor, block_RC: Tensor, num_slots: int) -> Tensor:
    """Count True positions of each block slot: ``[R, C] -> [R, S]`` int32."""
    counts = torch.zeros(mask_RC.shape[0], num_slots + 1, dtype=torch.int32, device=mask_RC.device)
    counts.scatter_add_(1, block_RC, mask_RC.to(torch.int32))
    return counts[:, :num_slots]


def at_positions(value_RS: Tensor, block_RC: Tensor) -> Tensor:
    """Spread a bool per block slot over its positions: ``[R, S] -> [R, C]``; no block is False."""
    padded = torch.nn.functional.pad(value_RS, (0, 1))
    return padded.gather(1, block_RC)


def leading(flag_RX: Tensor) -> Tensor:
    """Length of the leading run of True along the last axis, int64 ``[R]``."""
    return flag_RX.to(torch.int32).cumprod(dim=1).sum(dim=1)


def at_rows(parts: Sequence[Tensor], rows: Sequence[Tensor], num_rows: int) -> Tensor:
    """Scatter per-chunk values to ``[num_rows, ...]``; rows of no chunk are zero."""
    values, index_T = torch.cat(list(parts)), torch.cat(list(rows))
    return values.new_zeros(num_rows, *values.shape[1:]).index_copy_(0, index_T, values)


def best_per_block(
    score_RC: Tensor, candidates_RC: Tensor, block_RC: Tensor, num_slots: int
) -> Tensor:
    """Pick the best candidate of each block, bool ``[R, C]``; ties go to the lower position."""
    score_RC = score_RC.masked_fill(~candidates_RC, NEGATIVE_INFINITY)
    best = score_RC.new_full((score_RC.shape[0], num_slots + 1), NEGATIVE_INFINITY)
    best.scatter_reduce_(1, block_RC, score_RC, "amax")
    is_best_RC = candidates_RC & (score_RC == best.gather(1, block_RC))
    num_positions = score_RC.shape[1]
    position_RC = torch.arange(num_positions, device=score_RC.device).expand_as(block_RC)
    first = block_RC.new_full((score_RC.shape[0], num_slots + 1), num_positions)
    first.scatter_reduce_(1, block_RC, position_RC.where(is_best_RC, num_positions), "amin")
    return is_best_RC & (position_RC == first.gather(1, block_RC))


def rank(score_RC: Tensor, candidates_RC: Tensor) -> Tensor:
    """Rank of each candidate by falling score, int64 ``[R, C]``; ties go to the lower position.

    Positions that are no candidates rank behind all candidates.
    """
    score_RC = score_RC.masked_fill(~candidates_RC, NEGATIVE_INFINITY)
    # A NaN or -inf candidate must still rank before every non-candidate.
    order_RC = torch.sort(candidates_RC.to(torch.int8), dim=1, descending=True, stable=True)[1]
    by_score = torch.sort(score_RC.gather(1, order_RC), dim=1, descending=True, stable=True)[1]
    order_RC = order_RC.gather(1, by_score)
    ranks = torch.empty_like(order_RC)
    position_RC = torch.arange(score_RC.shape[1], device=score_RC.device).expand_as(order_RC)
    return ranks.scatter_(1, order_RC, position_RC)


def rank_in_block(
    score_RC: Tensor, candidates_RC: Tensor, block_RC: Tensor, num_slots: int
) -> Tensor:
    """As :func:`rank`, counted anew in each block slot; int64 ``[R, C]``."""
    ranks_RC = rank(score_RC, candidates_RC)
    block_RC = block_RC.where(candidates_RC, num_slots)
    # By block, and within a block by rank: blocks are few, so both fit one key.
    num_positions = score_RC.shape[1]
    order_RC = (block_RC * num_positions + ranks_RC).argsort(dim=1)
    position_RC = torch.arange(num_positions, device=score_RC.device).expand_as(order_RC)
    place_RC = torch.empty_like(order_RC).scatter_(1, order_RC, position_RC)
    counts_RS = per_block(candidates_RC, block_RC, num_slots).to(torch.int64)
    first_RS = torch.nn.functional.pad(counts_RS.cumsum(dim=1), (1, 0))
    return place_RC - first_RS.gather(1, block_RC)


def row_stats(
    logits_TV: Tensor,
    uniform_T: Tensor | None,
    want_entropy: bool,
    want_margin: bool,
    token_T: Tensor | None = None,
) -> tuple[RowStats, Tensor | None, Tensor | None]:
    """Token, confidence and ranking scores of every row.

    Args:
        logits_TV: float32, banned tokens at -inf, temperature and filters applied.
        uniform_T: float32 in (0, 1) per row: the token is drawn by inverting the cumulative
            distribution; NaN (or None for all rows) takes the most probable token instead.
        want_entropy: also return ``sum p ln(p + 1e-10)`` (D2F ``neg_entropy``).
        want_margin: also return the gap of the two largest probabilities.
        token_T: int64, tokens that were chosen already; only their confidence is wanted.
    Returns:
        stats (score = confidence), negative entropy or None, margin or None.
    """
    if token_T is None:
        token_T = logits_TV.argmax(dim=-1)
    probs_TV = torch.softmax(logits_TV, dim=-1)
    if uniform_T is not None:
        mass_TV = probs_TV.cumsum(dim=-1)
        target_T1 = uniform_T[:, None] * mass_TV[:, -1:]
        drawn_T = torch.searchsorted(mass_TV, target_T1, right=True).squeeze(1)
        drawn_T = drawn_T.clamp_max(probs_TV.shape[-1] - 1)
        token_T = torch.where(uniform_T.isnan(), token_T, drawn_T)
    confidence_T = probs_TV.gather(1, token_T[:, None]).squeeze(1)
    entropy_T = (probs_TV * (probs_TV + 1e-10).log()).sum(dim=-1) if want_entropy else None
    margin_T = None
    if want_margin:
        top2 = probs_TV.topk(2, dim=-1).values
        margin_T = top2[:, 0] - top2[:, 1]
    return RowStats(token_T, confidence_T, confidence_T), entropy_T, margin_T


def drawn_order(score_T: Tensor, temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
    """Scores whose k largest are k draws without replacement from ``softmax(score / T)``.

    Gumbel's top-k trick; rows with temperature 0 keep their score. All float32, `uniform_T` in
    (0, 1).
    """
    drawn_T = score_T / temperature_T.where(temperature_T > 0, 1.0) - (-uniform_T.log()).log()
    return torch.where(temperature_T > 0, drawn_T, score_T)


def counter_uniform(seed: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """Uniform float32 in (0, 1) that depends on (seed, position, step) alone.

    Three rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014) over int64, so a request
    draws the same numbers alone and inside any batch. Arguments broadcast; all int64.
    """
    state = _mix64(seed + _GOLDEN)
    state = _mix64(state ^ (position * _GOLDEN))
    state = _mix64(state ^ (step * _MIX_1))
    bits = _shift(state, 41)  # 23 bits and a half are exact in float32, so 1.0 is never reached
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def gumbel_uniform(seed_T: Tensor, position_T: Tensor, step_T: Tensor, vocab_size: int) -> Tensor:
    """Uniform float64 ``[T, V]`` in (0, 1): one number per token of (seed, position, step).

    As :func:`counter_uniform`, with the token id as a fourth counter and 52 bits.
    """
    token_V = torch.arange(vocab_size, device=seed_T.device)
    state = _mix64(seed_T + _GOLDEN)
    state = _mix64(state ^ (position_T * _GOLDEN))
    state = _mix64(state ^ (step_T * _MIX_1))
    bits_TV = _shift(_mix64(state[:, None] ^ (token_V * _MIX_2)), 12)
    return (bits_TV.to(torch.float64) + 0.5) * 2.0**-52


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)
