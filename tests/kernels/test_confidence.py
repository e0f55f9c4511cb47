"""Tokens and confidence of logits rows: the Triton kernels against the plain-torch reference."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dllm_plugin.kernels.confidence.reference import (
    Reading,
    RowSampling,
    RowStats,
    gumbel_uniform,
    propose_rows,
)

INF, NAN = float("inf"), float("nan")
KERNEL = "dllm_plugin.kernels.confidence.kernel.propose_rows"
SLOTS = 9
PROGRAMS = (1, 6)  # rows as a whole, or cut into ranges of a tile or two
# Less than a tile, a whole one, one token more, and enough for ranges of several tiles.
VOCABS = (2, 1024, 2049, 4100)


class Case(NamedTuple):
    """Arguments of both sides; rows whose confidence the two cannot agree on are NaN in both."""

    arguments: list[Any]
    options: dict[str, Any]

    def reading(self) -> Reading:
        return Reading(*self.arguments, **self.options)


def logits(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)


def tables(
    rows: int, temperatures: list[float], seed: int
) -> tuple[Tensor, RowSampling]:
    """Random slots for the rows, and random counters, some negative."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    temperature = torch.tensor(temperatures * SLOTS, dtype=torch.float32)[:SLOTS]
    sampling = RowSampling(
        temperature,
        integers(-(2**62), 2**62, SLOTS),
        integers(0, 50, SLOTS).to((torch.int32, torch.int64)[seed % 2]),
        integers(0, 4096, SLOTS),
        integers(0, 128, rows).to(torch.int32),
        seed % 2,
    )
    return integers(0, SLOTS, rows), sampling


def greedy(rows: int, vocab: int, dtype: torch.dtype) -> Case:
    x = logits(rows, vocab, dtype, vocab)
    return Case(
        [x, tables(rows, [0], vocab)[0], vocab // 3, None], {"want_ranking": True}
    )


def sampled(vocab: int, temperatures: list[float], **options: Any) -> Case:
    slots, sampling = tables(3, temperatures, vocab)
    return Case([logits(3, vocab, torch.bfloat16, vocab), slots, 1, sampling], options)


def broken() -> Case:
    """NaN, infinities, rows and ranges of banned ids alone, ties across ranges and in a lane."""
    x = logits(11, 2500, torch.float32, 1)
    x[0, 700] = x[0, 2400] = NAN
    x[1, 1800] = INF
    x[2, [5, 2200]] = INF
    x[3] = -INF
    x[4, :2048] = -INF
    x[5, 1024:] = -INF
    x[6, [40, 1064, 2400]] = 30.0
    x[7] = 1.0
    x[8, 3], x[8, 2100] = INF, NAN
    x[9, 6] = NAN  # at the mask id: banned like any number there
    x[10, :] = -INF
    x[10, 2499] = -5.0
    return Case([x, torch.arange(11) % SLOTS, 6, None], {"want_ranking": True})


def broken_sampled() -> Case:
    case, (_, sampling) = broken(), tables(11, [0.7], 3)
    return Case([*case.arguments[:3], sampling], case.options)


def near_ties() -> Case:
    """Sampling among equals where noise hardly matters and where it rules, and close races.

    In rows 2 to 4 two tokens that share a lane are nearer to each other than the float32
    approximation of the noise can tell, so the kernel has to read them again.
    """
    x = torch.zeros(5, 3000)
    slots, sampling = tables(5, [0.01, 40.0, 1.0, 1.0, 1.0], 5)
    slots = torch.arange(5)
    position = sampling.start_N[slots] + sampling.offset_T + sampling.shift
    counter = (sampling.seed_N[slots], position, sampling.counter_N[slots].long())
    noise = -(-gumbel_uniform(*counter, 3000).log()).log()
    x[2:] = -INF
    x[2:, 17] = 0.0
    for row, ahead in ((2, 2e-6), (3, -2e-6), (4, 4e-7)):
        x[row, 17 + 1024] = noise[row, 17] - noise[row, 17 + 1024] + ahead
    return Case([x, slots, -1, sampling], {})


def biased() -> Case:
    slots, sampling = tables(4, [0, 1.0], 6)
    bias = torch.zeros(3, 1500)
    bias[1, ::2], bias[2] = (
        -INF,
        torch.randn(1500, generator=torch.Generator().manual_seed(6)) * 9,
    )
    rows = torch.arange(SLOTS) % 3
    x = logits(4, 1500, torch.float16, 6)
    return Case([x, slots, 77, sampling], {"bias": (bias, rows), "want_ranking": True})


def none_left(hot: bool = False) -> Case:
    """Rows at -inf alone: by the model, or because a bias bans what the model leaves."""
    _, sampling = tables(4, [0.8 * hot], 6)
    bias = torch.zeros(2, 1500)
    bias[1, ::2] = -INF
    x = logits(4, 1500, torch.float32, 6)
    x[0], x[1, 1::2], x[2, 1::2] = -INF, -INF, -INF
    rows = torch.arange(SLOTS) % 2
    return Case(
        [x, torch.arange(4), 77, sampling], {"bias": (bias, rows), "want_ranking": True}
    )


def gathered() -> Case:
    """Rows of a table in another order, and zeros behind them."""
    slots, sampling = tables(3, [0.3, 0], 7)
    source = torch.tensor([6, 0, 3])
    x = logits(7, 1100, torch.bfloat16, 7)
    return Case(
        [x, slots, 5, sampling],
        {"source_T": source, "num_rows": 5, "want_ranking": True},
    )


def chosen() -> Case:
    slots, sampling = tables(3, [0.3, 0], 8)
    x = logits(6, 2000, torch.float32, 8)
    source = torch.tensor([0, 5, 3])
    tokens = x[source].argmax(dim=-1)  # likely ones: a wrong mass shows
    tokens[2] = 5
    x[5] = -INF
    return Case([x, slots, 5, sampling], {"token_T": tokens, "source_T": source})


CASES: dict[str, Callable[[], Case]] = {
    **{f"greedy_{v}": lambda v=v: greedy(2, v, torch.bfloat16) for v in VOCABS},
    "greedy_one_row": lambda: greedy(1, 5000, torch.float32),
    "greedy_no_row": lambda: greedy(0, 300, torch.bfloat16),
    "only_missing_rows": lambda: Case(
        greedy(0, 300, torch.bfloat16).arguments, {"num_rows": 2}
    ),
    "sampled_cold": lambda: sampled(2049, [0.3]),
    "sampled_mixed": lambda: sampled(4100, [0, 0.3, 5.0], want_ranking=True),
    "sampled_hot": lambda: sampled(300, [1e4]),
    "untempered_confidence": lambda: sampled(
        2049, [0, 0.7], temper=False, want_ranking=True
    ),
    "tempered_before": lambda: sampled(1500, [0, 0.7], temper=False, divide=False),
    "broken": broken,
    "broken_sampled": broken_sampled,
    "near_ties": near_ties,
    "biased": biased,
    "none_left": none_left,
    "none_left_sampled": lambda: none_left(hot=True),
    "gathered": gathered,
    "chosen": chosen,
}


def check(case: Case, got: RowStats, name: str) -> None:
    """Equal tokens and near numbers: what the reference computes from whole rows."""
    want = propose_rows(case.reading())
    assert torch.equal(got.token_T, want.token_T), name
    assert torch.equal(got.broken_T, want.broken_T), name
    close = {"rtol": 2e-5, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(got.confidence_T, want.confidence_T, **close)
    assert (got.entropy_T is None) == (want.entropy_T is None)
    if want.entropy_T is not None:
        assert got.entropy_T is not None and want.margin_T is not None
        torch.testing.assert_close(got.margin_T, want.margin_T, **close)
        # 1e-10 inside the logarithm adds at most that much for each token.
        close["atol"] += 1e-10 * case.arguments[0].shape[1]
        torch.testing.assert_close(got.entropy_T, want.entropy_T, **close)


@pytest.fixture(scope="module")
def interpreted(interpreter: Any) -> dict[tuple[str, int], RowStats]:
    """What the kernels return for each case, from memory that was filled with NaN."""
    cases = [case() for case in CASES.values()]
    launches = [
        (KERNEL, None, [case.reading()], {"programs": programs})
        for programs in PROGRAMS
        for case in cases
    ]
    names = [(name, programs) for programs in PROGRAMS for name in CASES]
    return dict(zip(names, interpreter.run(launches), strict=True))


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_the_reference(
    name: str, programs: int, interpreted: dict[Any, RowStats]
) -> None:
    case = CASES[name]()
    kept = case.arguments[0].clone()
    check(case, interpreted[name, programs], name)
    assert torch.equal(case.arguments[0].nan_to_num(9.5), kept.nan_to_num(9.5))


def test_the_cases_hold_what_they_promise() -> None:
    """Samples that are not the largest logit, ties, and rows without a confidence."""
    differ = 0
    for name in ("sampled_mixed", "untempered_confidence", "biased", "gathered"):
        case = CASES[name]()
        plain = propose_rows(case.reading()._replace(sampling=None)).token_T
        sampled_T = propose_rows(case.reading()).token_T
        is_sampled_T = case.arguments[3].temperature_N[case.arguments[1]] > 0
        differs_T = (plain != sampled_T)[: len(is_sampled_T)]
        differ += int(differs_T.sum())
        assert not differs_T[~is_sampled_T].any()
    assert differ > 1
    case = near_ties()
    assert propose_rows(case.reading()).token_T.tolist()[2:4] == [1041, 17]
    case = broken()
    stats = propose_rows(case.reading())
    assert stats.token_T.tolist()[:4] == [700, 1800, 5, 0]
    assert stats.token_T.tolist()[6:9] == [40, 0, 2100]
    assert stats.confidence_T.isnan().tolist() == [
        i in (0, 1, 2, 3, 8) for i in range(11)
    ]
    assert stats.broken_T.tolist() == [i in (0, 1, 2, 3, 8) for i in range(11)]
    for case, rows in ((none_left(), 0), (none_left(hot=True), 0), (chosen(), 1)):
        stats = propose_rows(case.reading())
        assert stats.broken_T.nonzero().flatten().tolist() == [rows]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_samples_follow_the_tempered_softmax(temperature: float) -> None:
    """A chi-square over positions; banned ids are never sampled."""
    rows, vocab = 40_000, 40
    row = logits(1, vocab, torch.float32, 9) / 4
    row[0, [0, 7, 39]] = -INF
    sampling = RowSampling(
        torch.tensor([temperature]),
        torch.tensor([11]),
        torch.tensor([3]),
        torch.tensor([5]),
        torch.arange(rows),
        0,
    )
    slots = torch.zeros(rows, dtype=torch.int64)
    stats = propose_rows(Reading(row.expand(rows, -1), slots, 20, sampling))
    probs = row[0].double()
    probs[20] = -INF
    probs = (probs / temperature).softmax(0)
    counts = stats.token_T.bincount(minlength=vocab)
    assert counts[probs == 0].sum() == 0
    wanted = rows * probs[probs > 0]
    statistic = float(((counts[probs > 0] - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert abs(statistic - freedom) / math.sqrt(2 * freedom) < 4
    torch.testing.assert_close(
        stats.confidence_T.double(), probs[stats.token_T], rtol=1e-4, atol=1e-6
    )
