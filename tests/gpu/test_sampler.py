"""Tokens and confidence on a GPU, at the vocabularies of LLaDA and Dream, against the reference."""

import math

import pytest
import torch
from mixed import BLOCK, D2F, ONE_BLOCK, SEVERAL, check_alike, check_steps

from dllm_plugin.kernels.confidence import kernel as confidence
from dllm_plugin.kernels.confidence.reference import (
    Columns,
    Reading,
    RowSampling,
    RowStats,
    propose_rows,
)
from dllm_plugin.kernels.move_rows import move_rows, move_rows_reference

SLOTS = 64


def sampling_of(
    rows: int, temperatures: list[float]
) -> tuple[torch.Tensor, RowSampling]:
    generator = torch.Generator(device="cuda").manual_seed(rows)

    def integers(low: int, high: int, size: int) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=generator, device="cuda")

    temperature = torch.tensor(temperatures * SLOTS, device="cuda")[:SLOTS]
    tables = (
        integers(-(2**62), 2**62, SLOTS),
        integers(0, 99, SLOTS),
        integers(0, 9999, SLOTS),
    )
    return integers(0, SLOTS, rows), RowSampling(
        temperature, *tables, integers(0, 128, rows), 1
    )


def expected(logits, slots, mask, sampling, **options) -> RowStats:
    """The reference, a few rows at a time: it needs eight bytes and more for every logit."""
    found = []
    for low in range(0, len(slots), 128):
        rows = slice(low, low + 128)
        few = sampling and sampling._replace(offset_T=sampling.offset_T[rows])
        some = Reading(logits[rows], slots[rows], mask, few, **options)
        found.append(propose_rows(some))
    return RowStats(
        *(None if x[0] is None else torch.cat(x) for x in zip(*found, strict=True))
    )


def check(got: RowStats, want: RowStats, vocab: int) -> None:
    assert torch.equal(got.token_T, want.token_T)
    close = {"rtol": 1e-4, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(got.confidence_T, want.confidence_T, **close)
    if want.margin_T is not None:
        torch.testing.assert_close(got.margin_T, want.margin_T, **close)
        close["atol"] += 1e-10 * vocab
        torch.testing.assert_close(got.entropy_T, want.entropy_T, **close)


@pytest.mark.parametrize("temper", [True, False], ids=["tempered", "plain"])
@pytest.mark.parametrize(
    "temperatures", [[0.0], [0.3], [1.0], [0.0, 0.3, 1.0, 5.0]], ids=str
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str
)
@pytest.mark.parametrize("vocab", [2, 1025, 32000, 126464, 152064, 151669])
@pytest.mark.parametrize("rows", [1, 33])
def test_every_size(rows, vocab, dtype, temperatures, temper):
    slots, sampling = sampling_of(rows, temperatures)
    logits = (torch.randn(rows, vocab, device="cuda") * 4).to(dtype)
    arguments = (logits, slots, vocab // 2, sampling if any(temperatures) else None)
    for programs in (1, 300, 100_000):
        options = {"temper": temper, "want_ranking": True}
        got = confidence.propose_rows(Reading(*arguments, **options), programs)
        check(got, expected(*arguments, **options), vocab)


@pytest.mark.parametrize("temperatures", [[0.0], [0.7], [1.0, 0.0]], ids=str)
def test_a_full_step_takes_the_same_tokens(temperatures):
    """64 requests of 32 rows at Dream's vocabulary; logits as flat as bf16 makes ties of them."""
    slots, sampling = sampling_of(2048, temperatures)
    logits = torch.randn(2048, 152064, device="cuda", dtype=torch.bfloat16)
    logits[::3] *= 6
    arguments = (logits, slots, 151666, sampling if any(temperatures) else None)
    before = logits.clone()
    check(confidence.propose_rows(Reading(*arguments)), expected(*arguments), 152064)
    assert torch.equal(before, logits)


@pytest.mark.parametrize("temperatures", [[0.0], [0.7, 0.0]], ids=str)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("rows", [1, 300])
def test_columns_of_ranks_merge_to_whole_rows(rows, ranks, temperatures):
    """As under `vocab_parallel`, with padding behind an odd vocabulary."""
    vocab, padded = 151669, 151680
    slots, sampling = sampling_of(rows, temperatures)
    logits = torch.randn(rows, padded, device="cuda").to(torch.bfloat16)
    logits[:, vocab:] = 99.0
    sampling, width = sampling if any(temperatures) else None, padded // ranks
    partials = [
        confidence.scan_rows(
            Reading(
                logits[:, first : first + width].contiguous(),
                *(slots, 77, sampling),
                want_ranking=True,
            ),
            Columns(first, vocab, ranks),
        )
        for first in range(0, padded, width)
    ]
    got = confidence.merge_rows(torch.stack(partials), want_ranking=True, num_rows=rows)
    check(
        got, expected(logits[:, :vocab], slots, 77, sampling, want_ranking=True), vocab
    )


def test_nothing_large_is_allocated():
    slots, sampling = sampling_of(2048, [0.7])
    logits = torch.randn(2048, 152064, device="cuda", dtype=torch.bfloat16)
    rows = Reading(logits, slots, 5, sampling, want_ranking=True)
    confidence.propose_rows(rows)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    confidence.propose_rows(rows)
    assert torch.cuda.max_memory_allocated() - before < 2 << 20


def test_rows_that_are_broken():
    """NaN, infinities, banned rows, ties across ranges; biases; rows of a table; given tokens."""
    nan, inf, vocab = float("nan"), float("inf"), 100_000
    logits = torch.randn(10, vocab, device="cuda")
    logits[0, [70_000, 80_000]] = nan
    logits[1, 90_000] = inf
    logits[2] = -inf
    logits[3, :99_000] = -inf
    logits[4, [5, 60_000, 99_999]] = 30.0
    logits[5] = 1.0
    logits[6, 3], logits[6, 99_998] = inf, nan
    slots, sampling = sampling_of(10, [0.0, 0.7])
    bias = torch.zeros(3, vocab, device="cuda")
    bias[1, ::2], bias[2, 7] = -inf, 50.0
    table = (bias, torch.arange(SLOTS, device="cuda") % 3)
    source = torch.tensor([9, 0, 3, 3, 6, 1], device="cuda")
    tokens = torch.arange(10, device="cuda") * 9999
    for noise in (None, sampling):
        for options in ({}, {"bias": table}, {"token_T": tokens}):
            rows = Reading(logits, slots, 6, noise, want_ranking=True, **options)
            check(confidence.propose_rows(rows), propose_rows(rows), vocab)
        few = noise and noise._replace(offset_T=noise.offset_T[:6])
        options = {"source_T": source, "num_rows": 8}
        rows = Reading(logits, slots[:6], 6, few, **options)
        check(confidence.propose_rows(rows), propose_rows(rows), vocab)


def test_samples_follow_the_softmax():
    rows, vocab, kinds = 200_000, 1200, 40
    row = torch.full((vocab,), -float("inf"), device="cuda")
    row[torch.arange(kinds) * 30] = torch.randn(kinds, device="cuda")
    slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
    table = [torch.tensor([x], device="cuda") for x in (0.8, 3, 4, 5)]
    sampling = RowSampling(*table, torch.arange(rows, device="cuda"), 0)
    reading = Reading(row.expand(rows, -1), slots, 1, sampling)
    tokens = confidence.propose_rows(reading).token_T
    wanted = rows * (row.double() / 0.8).softmax(0)
    counts = tokens.bincount(minlength=vocab)
    assert counts[wanted == 0].sum() == 0
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    assert abs(statistic - (kinds - 1)) / math.sqrt(2 * (kinds - 1)) < 4


@pytest.mark.parametrize("vocab", [1000, 8192, 152064])
def test_only_carry_rows_move(vocab):
    rows, first = 96, torch.zeros(32, vocab, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    second = first.clone()
    slots = torch.randperm(32, device="cuda")[:20]
    source = torch.randint(0, rows, (20,), device="cuda", dtype=torch.int32)
    moved = torch.rand(20, device="cuda") < 0.4
    move_rows(logits, source, first, slots, moved)
    move_rows_reference(logits, source, second, slots, moved)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("dllm", "shift"),
    [
        (D2F, False),
        (D2F, True),
        (ONE_BLOCK, False),
        (BLOCK | {"policy": "low_confidence"}, False),
        (BLOCK | {"policy": "entropy"}, False),
    ],
    ids=["d2f", "d2f-shifted", "one-block", "low_confidence", "entropy"],
)
def test_compiled_steps_take_the_same_decisions(dllm, shift):
    """And compile nothing once requests run."""
    check_alike(dllm, shift, "inductor")


def test_other_policies_run_uncompiled():
    sizes, forwards = check_steps(BLOCK, True, "inductor", SEVERAL)
    assert len(sizes) > 10 and max(sizes) > 2 and sum(sizes) < forwards
