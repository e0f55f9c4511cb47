"""Propose a token and its confidence from logits rows: the plain-torch reference implementation.

It is what CPUs run. Random numbers come from counters (SplitMix64). Shape letters as in
:mod:`dllm_plugin.decoding.plan`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")
ALL_BANNED = -1e15  # counts as the largest logit if a bias leaves no id
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed 64-bit number
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15


class RowStats(NamedTuple):
    """Store the proposed token of each logits row and its confidence.

    token_T int64; confidence_T float32, probability of the token; broken_T int32, 1 if the
    largest logit is NaN or infinite (not if a bias bans all ids); if asked for, entropy_T
    float32 ``sum p ln(p + 1e-10)`` (D2F ``neg_entropy``) and margin_T float32, the difference of
    the two largest probabilities. NaN if a row is broken or has only banned ids.
    """

    token_T: Tensor
    confidence_T: Tensor
    broken_T: Tensor
    entropy_T: Tensor | None = None
    margin_T: Tensor | None = None


class RowSampling(NamedTuple):
    """Describe how rows are sampled; a row is greedy if its slot's temperature is 0.

    temperature_N float32, seed_N int64, counter_N int32 or int64, start_N int64 per slot;
    offset_T int, added with `shift` to the slot's start: the position that a row predicts. Seed,
    position and counter determine a row's random numbers.
    """

    temperature_N: Tensor
    seed_N: Tensor
    counter_N: Tensor
    start_N: Tensor
    offset_T: Tensor
    shift: int


class HotRows(NamedTuple):
    """List the rows that sample: a request with a temperature costs only its own rows.

    rows_S      int64
    divided_SV  float32, their logits divided by the temperature
    """

    rows_S: Tensor
    divided_SV: Tensor


class Columns(NamedTuple):
    """Describe a rank's columns of rows that `shards` ranks share.

    They are ``[first, first + width)``; `width` is that of the tensor and the same on every rank.
    Columns from `vocab_size` on are padding.
    """

    first: int
    vocab_size: int
    shards: int


class Reading(NamedTuple):
    """Describe T logits rows and how they are read; X rows of logits, M rows of biases.

    logits_XV   bfloat16, float16 or float32; -inf bans a token
    slot_T      int, slot of each row
    mask_id     the one id that is always banned; -1 for none
    sampling    None if all rows are greedy
    divide      whether the temperature still has to divide the logits before the noise is added
    temper      whether the confidence, too, is read from the logits divided by the temperature
    want_ranking  also return entropy and margin, of the same distribution as the confidence
    bias        float32 ``[M, V]`` that is added, and int64 per slot the row of it that counts; row
                0 is zero
    source_T    int, which row of `logits_XV` each row is; None if all of them in order
    token_T     int64, tokens that were chosen before: only their confidence is computed, and rows
                are broken if these tokens' logits are NaN or inf, or all logits -inf
    num_rows    length of the result; entries after the rows are zero
    """

    logits_XV: Tensor
    slot_T: Tensor
    mask_id: int
    sampling: RowSampling | None = None
    divide: bool = True
    temper: bool = True
    want_ranking: bool = False
    bias: tuple[Tensor, Tensor] | None = None
    source_T: Tensor | None = None
    token_T: Tensor | None = None
    num_rows: int | None = None

    def in_float32(self) -> Tensor:
        """Return a float32 copy of the rows, ``[T, V]``."""
        if self.source_T is None:
            return self.logits_XV.to(torch.float32, copy=True)
        return self.logits_XV[self.source_T].to(torch.float32)


def propose_rows(rows: Reading) -> RowStats:
    """Propose a token for every row, with its confidence.

    Rows are sampled with Gumbel noise: the token with the largest
    ``logit / temperature - ln(-ln u)`` follows ``softmax(logits / temperature)`` (LLaDA
    ``generate.py``, ``add_gumbel_noise``, in float64 as there); ``u`` is :func:`gumbel_uniform`.
    Greedy rows take the largest logit. Ties go to the lower id, and a NaN is the largest number.
    """
    slot_T = rows.slot_T
    bias = rows.bias
    token_T = rows.token_T
    sampling = rows.sampling
    logits_TV = rows.in_float32()
    if bias is not None:
        add_bias(logits_TV, bias, slot_T)
    if rows.mask_id >= 0:
        logits_TV[:, rows.mask_id] = NEGATIVE_INFINITY
    hot = None if sampling is None else hot_rows(logits_TV, slot_T, sampling)
    largest_T = None if token_T is None else logits_TV.amax(dim=-1)
    if token_T is None:
        noisy = hot
        if hot is not None and not rows.divide:
            noisy = hot._replace(divided_SV=logits_TV[hot.rows_S])
        token_T, _ = choose(logits_TV, noisy, slot_T, sampling)
    chosen_T = logits_TV.gather(1, token_T[:, None]).squeeze(1)
    largest_T = chosen_T if largest_T is None else largest_T
    if bias is not None:
        largest_T = torch.maximum(largest_T, lowest(bias, slot_T, NEGATIVE_INFINITY))
    broken_T = is_broken(chosen_T, largest_T)
    if hot is not None and rows.temper:
        logits_TV.index_copy_(0, *hot)
    stats = row_stats(logits_TV, token_T, broken_T, rows.want_ranking)
    return with_missing(stats, rows.num_rows)


def add_bias(
    logits_TV: Tensor, bias: tuple[Tensor, Tensor], slot_T: Tensor, first: int = 0
) -> None:
    """Add, in place, to the rows of requests with biases; column 0 is token `first`."""
    bias_MV, row_N = bias
    row_T = row_N[slot_T]
    rows = row_T.nonzero().squeeze(1)
    columns = slice(first, first + logits_TV.shape[1])
    logits_TV.index_add_(0, rows, bias_MV[row_T[rows], columns])


def is_broken(chosen_T: Tensor, largest_T: Tensor) -> Tensor:
    """Return, as int32, whether a chosen logit is NaN or inf, or the largest of its row is -inf.

    The model rules out an id at -inf, which is no fault.
    """
    no_number_T = ~(chosen_T < float("inf"))
    return (no_number_T | (largest_T == NEGATIVE_INFINITY)).to(torch.int32)


def lowest(bias: tuple[Tensor, Tensor], slot_T: Tensor, otherwise: float) -> Tensor:
    """Return what the largest logit of a row counts as at least.

    That a bias bans all ids is the request's own doing, so such a row is not broken.
    """
    _, row_N = bias
    return torch.where(row_N[slot_T] > 0, ALL_BANNED, otherwise).to(torch.float32)


def hot_rows(logits_TV: Tensor, slot_T: Tensor, sampling: RowSampling) -> HotRows:
    """Find the rows that sample; on CPUs nothing waits for how many they are."""
    temperature_T = sampling.temperature_N[slot_T]
    rows_S = (temperature_T > 0).nonzero().squeeze(1)
    return HotRows(rows_S, logits_TV[rows_S] / temperature_T[rows_S, None])


def choose(
    logits_TV: Tensor,
    hot: HotRows | None,
    slot_T: Tensor,
    sampling: RowSampling | None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return each row's winning column int64, and its score float64; column 0 is token `first`."""
    token_T = logits_TV.argmax(dim=-1)
    best_T = logits_TV.gather(1, token_T[:, None]).squeeze(1).to(torch.float64)
    if hot is None or sampling is None:
        return token_T, best_T
    rows_S, divided_SV = hot
    slot_S = slot_T[rows_S]
    step_S = sampling.counter_N[slot_S].to(torch.int64)
    position_S = sampling.start_N[slot_S] + sampling.offset_T[rows_S] + sampling.shift
    counter = (sampling.seed_N[slot_S], position_S, step_S)
    uniform_SV = gumbel_uniform(*counter, logits_TV.shape[1], first)
    noisy_SV = divided_SV.to(torch.float64) - (-uniform_SV.log()).log()
    sampled_S = noisy_SV.argmax(dim=-1)
    noisy_S = noisy_SV.gather(1, sampled_S[:, None]).squeeze(1)
    return token_T.index_copy(0, rows_S, sampled_S), best_T.index_copy(
        0, rows_S, noisy_S
    )


def with_missing(stats: RowStats, num_rows: int | None) -> RowStats:
    """Append zeros up to `num_rows` rows."""
    missing = 0 if num_rows is None else num_rows - len(stats.token_T)
    if not missing:
        return stats
    padded = (
        None if x is None else torch.nn.functional.pad(x, (0, missing)) for x in stats
    )
    return RowStats(*padded)  # type: ignore[arg-type]


def row_stats(
    logits_TV: Tensor, token_T: Tensor, broken_T: Tensor, want_ranking: bool
) -> RowStats:
    """Compute how sure the model is of given tokens; `logits_TV` float32, banned ids at -inf."""
    probs_TV = torch.softmax(logits_TV, dim=-1)
    confidence_T = probs_TV.gather(1, token_T[:, None]).squeeze(1)
    if not want_ranking:
        return RowStats(token_T, confidence_T, broken_T)
    entropy_T = (probs_TV * (probs_TV + 1e-10).log()).sum(dim=-1)
    top2 = probs_TV.topk(2, dim=-1).values
    return RowStats(token_T, confidence_T, broken_T, entropy_T, top2[:, 0] - top2[:, 1])


def sampled_order(score_T: Tensor, temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
    """Return scores whose k largest are a sample without replacement from ``softmax(score / T)``.

    This is the Gumbel-top-k trick; rows with temperature 0 keep their score. All tensors are
    float32, `uniform_T` in (0, 1).
    """
    sampled_T = (
        score_T / temperature_T.where(temperature_T > 0, 1.0) - (-uniform_T.log()).log()
    )
    return torch.where(temperature_T > 0, sampled_T, score_T)


def counter_uniform(seed: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """Return uniform float32 in (0, 1) that depend only on (seed, position, step).

    Three rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014) over int64, so a request
    gets the same numbers in every batch. Arguments broadcast; all int64.
    """
    # 23 bits and a half are exact in float32, so 1.0 is never reached.
    bits = _shift(_mixed_state(seed, position, step), 41)
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def gumbel_uniform(
    seed_T: Tensor, position_T: Tensor, step_T: Tensor, width: int, first: int = 0
) -> Tensor:
    """Return uniform float64 ``[T, width]`` in (0, 1), one per row and token id.

    It is :func:`counter_uniform` with 52 bits and a fourth counter: the token id, from `first` on.
    """
    token_V = torch.arange(first, first + width, device=seed_T.device)
    state = _mixed_state(seed_T, position_T, step_T)
    bits_TV = _shift(_mix64(state[:, None] ^ (token_V * _MIX_2)), 12)
    return (bits_TV.to(torch.float64) + 0.5) * 2.0**-52


def _mixed_state(seed: Tensor, position: Tensor, step: Tensor) -> Tensor:
    state = _mix64(seed + _GOLDEN)
    state = _mix64(state ^ (position * _GOLDEN))
    return _mix64(state ^ (step * _MIX_1))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)
