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

    token_T int64; confidence_T float32, probability of the token; where asked for, entropy_T
    float32 ``sum p ln(p + 1e-10)`` (D2F ``neg_entropy``) and margin_T float32, the gap of the two
    largest probabilities. NaN where a row holds a NaN or nothing but banned ids.
    """

    token_T: Tensor
    confidence_T: Tensor
    entropy_T: Tensor | None = None
    margin_T: Tensor | None = None


class Draws(NamedTuple):
    """Where the random numbers of rows come from: a row draws if its slot's temperature is not 0.

    temperature_N float32, seed_N int64, counter_N int32 or int64, start_N int64 per slot;
    offset_T int, added with `shift` to the slot's start: the position that a row predicts.
    """

    temperature_N: Tensor
    seed_N: Tensor
    counter_N: Tensor
    start_N: Tensor
    offset_T: Tensor
    shift: int


class Columns(NamedTuple):
    """Columns ``[first, first + width)`` of rows that `shards` ranks hold together.

    `width` is that of the tensor, the same on every rank; columns from `vocab_size` on are padding.
    """

    first: int
    vocab_size: int
    shards: int


def per_block(mask_RC: Tensor, block_RC: Tensor, num_slots: int) -> Tensor:
    """Count True positions of each block slot: ``[R, C] -> [R, S]`` int32."""
    if torch.compiler.is_compiling():
        slot_S1 = torch.arange(num_slots, device=mask_RC.device)[:, None]
        return (mask_RC[:, None] & (block_RC[:, None] == slot_S1)).sum(dim=2, dtype=torch.int32)
    counts = torch.zeros(mask_RC.shape[0], num_slots + 1, dtype=torch.int32, device=mask_RC.device)
    counts.scatter_add_(1, block_RC, mask_RC.to(torch.int32))
    return counts[:, :num_slots]


def at_positions(value_RS: Tensor, block_RC: Tensor) -> Tensor:
    """Spread a bool per block slot over its positions: ``[R, S] -> [R, C]``; no block is False."""
    # Not by padding: compiled by torch 2.11 for GPUs, a padded bool of one element becomes True.
    num_slots = value_RS.shape[1]
    return value_RS.gather(1, block_RC.clamp_max(num_slots - 1)) & (block_RC < num_slots)


def leading(flag_RX: Tensor) -> Tensor:
    """Length of the leading run of True along the last axis, int64 ``[R]``."""
    position_X = torch.arange(flag_RX.shape[1], device=flag_RX.device)
    return torch.where(flag_RX, flag_RX.shape[1], position_X).amin(dim=1)


def at_rows(parts: Sequence[Tensor], rows: Sequence[Tensor], num_rows: int) -> Tensor:
    """Scatter per-chunk values to ``[num_rows, ...]``; rows of no chunk are zero."""
    values, index_T = torch.cat(list(parts)), torch.cat(list(rows))
    return values.new_zeros(num_rows, *values.shape[1:]).index_copy_(0, index_T, values)


def move_rows(
    from_TV: Tensor, from_R: Tensor, to_NV: Tensor, slots_R: Tensor, moved_R: Tensor
) -> None:
    """``to_NV[slots] = from_TV[from]`` where `moved_R` says so."""
    new_RV, old_RV = from_TV[from_R].to(to_NV.dtype), to_NV[slots_R]
    to_NV[slots_R] = torch.where(moved_R[:, None], new_RV, old_RV)


def best_per_block(
    score_RC: Tensor, candidates_RC: Tensor, block_RC: Tensor, num_slots: int
) -> Tensor:
    """Pick the best candidate of each block, bool ``[R, C]``; ties go to the lower position."""
    if torch.compiler.is_compiling():
        block_RC = block_RC.where(candidates_RC, num_slots)
        return candidates_RC & (_rank_by_counting(score_RC, candidates_RC, block_RC) == 0)
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
    if torch.compiler.is_compiling():
        return _rank_by_counting(score_RC, candidates_RC, None)
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
    block_RC = block_RC.where(candidates_RC, num_slots)
    if torch.compiler.is_compiling():
        return _rank_by_counting(score_RC, candidates_RC, block_RC)
    ranks_RC = rank(score_RC, candidates_RC)
    # By block, and within a block by rank: blocks are few, so both fit one key.
    num_positions = score_RC.shape[1]
    order_RC = (block_RC * num_positions + ranks_RC).argsort(dim=1)
    position_RC = torch.arange(num_positions, device=score_RC.device).expand_as(order_RC)
    place_RC = torch.empty_like(order_RC).scatter_(1, order_RC, position_RC)
    counts_RS = per_block(candidates_RC, block_RC, num_slots).to(torch.int64)
    first_RS = torch.nn.functional.pad(counts_RS.cumsum(dim=1), (1, 0))
    return place_RC - first_RS.gather(1, block_RC)


def _rank_by_counting(score_RC: Tensor, candidates_RC: Tensor, group_RC: Tensor | None) -> Tensor:
    """How many positions (of its group) come before each one. No score may be NaN.

    The form of :func:`rank` that compiles to one kernel; uncompiled it needs ``R * C * C`` bytes.
    """
    score_RC = score_RC.masked_fill(~candidates_RC, NEGATIVE_INFINITY)
    position_C = torch.arange(score_RC.shape[1], device=score_RC.device)
    mine, other = score_RC[:, :, None], score_RC[:, None]
    ahead_RCC = (other > mine) | ((other == mine) & (position_C < position_C[:, None]))
    candidate, other_candidate = candidates_RC[:, :, None], candidates_RC[:, None]
    ahead_RCC = (other_candidate & ~candidate) | ((other_candidate == candidate) & ahead_RCC)
    if group_RC is not None:
        ahead_RCC = ahead_RCC & (group_RC[:, :, None] == group_RC[:, None])
    return ahead_RCC.sum(dim=2)


def propose_rows(
    logits_XV: Tensor,
    slot_T: Tensor,
    mask_id: int,
    draws: Draws | None = None,
    *,
    divide: bool = True,
    temper: bool = True,
    want_rank: bool = False,
    bias: tuple[Tensor, Tensor] | None = None,
    source_T: Tensor | None = None,
    token_T: Tensor | None = None,
    num_rows: int | None = None,
) -> RowStats:
    """Token, confidence and ranking numbers of every row. X rows of logits, M rows of biases.

    A draw is Gumbel's: the token with the largest ``logit / temperature - ln(-ln u)``, which
    follows ``softmax(logits / temperature)`` (LLaDA ``generate.py``, ``add_gumbel_noise``, in
    float64 as there); ``u`` is :func:`gumbel_uniform`. Without a draw it is the largest logit;
    ties go to the lower id, and a NaN is the largest number.

    Args:
        logits_XV: bfloat16, float16 or float32; -inf is banned.
        slot_T: int, slot of each row.
        mask_id: the one id that is always banned; -1 for none.
        draws: None if no slot of these rows draws.
        divide: whether the temperature still has to divide the logits before the noise is added.
        temper: whether the confidence is read behind the temperature, too.
        want_rank: also return entropy and margin, of the same distribution as the confidence.
        bias: float32 ``[M, V]`` that is added, and int64 per slot the row of it that counts.
        source_T: int, row of `logits_XV` of each row; None if they are the same ones.
        token_T: int64, tokens that were chosen already: only their confidence is wanted.
        num_rows: length of the result; what lies behind the rows is zero.
    """
    logits_TV = logits_XV if source_T is None else logits_XV[source_T]
    logits_TV = logits_TV.to(torch.float32, copy=True)
    if bias is not None:
        logits_TV += bias[0][bias[1][slot_T]]
    if mask_id >= 0:
        logits_TV[:, mask_id] = NEGATIVE_INFINITY
    tempered_TV = logits_TV if draws is None else tempered(logits_TV, slot_T, draws)
    if token_T is None:
        token_T, _ = choose(logits_TV, tempered_TV if divide else logits_TV, slot_T, draws)
    stats = row_stats(tempered_TV if temper else logits_TV, token_T, want_rank)
    return with_missing(stats, num_rows)


def tempered(logits_TV: Tensor, slot_T: Tensor, draws: Draws) -> Tensor:
    """Logits over the temperature of rows that draw."""
    temperature_T = draws.temperature_N[slot_T]
    return logits_TV / temperature_T.where(temperature_T > 0, 1.0)[:, None]


def choose(
    logits_TV: Tensor, divided_TV: Tensor, slot_T: Tensor, draws: Draws | None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Which column wins each row, int64, and by what score, float64; column 0 is token `first`."""
    token_T = logits_TV.argmax(dim=-1)
    best_T = logits_TV.gather(1, token_T[:, None]).squeeze(1).to(torch.float64)
    if draws is None:
        return token_T, best_T
    step_T = draws.counter_N[slot_T].to(torch.int64)
    position_T = draws.start_N[slot_T] + draws.offset_T + draws.shift
    counter = (draws.seed_N[slot_T], position_T, step_T)
    uniform_TV = gumbel_uniform(*counter, logits_TV.shape[1], first)
    noisy_TV = divided_TV.to(torch.float64) - (-uniform_TV.log()).log()
    drawn_T = noisy_TV.argmax(dim=-1)
    noisy_T = noisy_TV.gather(1, drawn_T[:, None]).squeeze(1)
    draws_T = draws.temperature_N[slot_T] > 0
    return torch.where(draws_T, drawn_T, token_T), torch.where(draws_T, noisy_T, best_T)


def with_missing(stats: RowStats, num_rows: int | None) -> RowStats:
    """The same with zeros behind them, `num_rows` in all."""
    missing = 0 if num_rows is None else num_rows - len(stats.token_T)
    if not missing:
        return stats
    padded = (None if x is None else torch.nn.functional.pad(x, (0, missing)) for x in stats)
    return RowStats(*padded)  # type: ignore[arg-type]


def row_stats(logits_TV: Tensor, token_T: Tensor, want_rank: bool) -> RowStats:
    """How sure the model is of the given tokens; `logits_TV` float32, banned ids at -inf."""
    probs_TV = torch.softmax(logits_TV, dim=-1)
    confidence_T = probs_TV.gather(1, token_T[:, None]).squeeze(1)
    if not want_rank:
        return RowStats(token_T, confidence_T)
    entropy_T = (probs_TV * (probs_TV + 1e-10).log()).sum(dim=-1)
    top2 = probs_TV.topk(2, dim=-1).values
    return RowStats(token_T, confidence_T, entropy_T, top2[:, 0] - top2[:, 1])


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


def gumbel_uniform(
    seed_T: Tensor, position_T: Tensor, step_T: Tensor, width: int, first: int = 0
) -> Tensor:
    """Uniform float64 ``[T, width]`` in (0, 1): one number per token of (seed, position, step).

    As :func:`counter_uniform`, with the token id, from `first` on, as a fourth counter and 52 bits.
    """
    token_V = torch.arange(first, first + width, device=seed_T.device)
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
