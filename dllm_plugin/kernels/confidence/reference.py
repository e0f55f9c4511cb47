"""Propose a token and its confidence from logits rows: the plain-torch reference implementation.

It is what CPUs run. Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dllm_plugin.kernels.confidence.random_numbers import gumbel_uniform

NEGATIVE_INFINITY = float("-inf")


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
