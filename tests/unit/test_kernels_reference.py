"""The plain-torch kernels: row statistics, sampling, random numbers, block helpers."""

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch

from dllm_plugin.decoding.blocks import (
    at_positions,
    leading,
    per_block,
    rank,
    rank_in_block,
)
from dllm_plugin.kernels.confidence.reference import (
    Reading,
    RowSampling,
    counter_uniform,
    propose_rows,
    row_stats,
)
from dllm_plugin.kernels.move_rows import move_rows_reference
from dllm_plugin.reference.numbers import WIDE, counter_uniforms
from dllm_plugin.reference.numbers import counter_uniform as plain_uniform

NEGATIVE_INFINITY = float("-inf")
# Kernel, its reference.
SIBLINGS = [
    ("confidence.kernel.propose_rows", "confidence.reference.propose_rows"),
    ("confidence.kernel.scan_rows", "confidence.partial_reference.scan_rows"),
    ("confidence.kernel.merge_rows", "confidence.partial_reference.merge_rows"),
    ("move_rows.move_rows", "move_rows.move_rows_reference"),
    ("best_token.best_token", "best_token.best_token_reference"),
    ("floating.lay_out", "floating.lay_out_reference"),
    ("paged_attention.kernel.attend_spans", "paged_attention.reference.attend_spans"),
    ("paged_store.store_kv", "paged_store.store_kv_reference"),
    ("automaton.kernel.score_rows", "automaton.reference.score_rows"),
    ("automaton.kernel.choose_ids", "automaton.reference.choose_ids"),
    ("automaton.kernel.forward", "automaton.reference.forward"),
    ("automaton.kernel.backtrack", "automaton.reference.backtrack"),
    (
        "rotate_and_store.rotate_and_store",
        "rotate_and_store.rotate_and_store_reference",
    ),
]


def function(name: str) -> Any:
    """A function of the kernels by its name."""
    module, _, attribute = f"dllm_plugin.kernels.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(("kernel", "reference"), SIBLINGS)
def test_a_kernel_has_the_signature_of_its_reference(
    kernel: str, reference: str
) -> None:
    """Only numbers that tune the launch come on top, and they have defaults."""
    expected = inspect.signature(function(reference))
    found = inspect.signature(function(kernel))
    shared = [found.parameters[name] for name in expected.parameters]
    assert shared == list(expected.parameters.values())
    assert found.return_annotation == expected.return_annotation
    more = [p for p in found.parameters.values() if p.name not in expected.parameters]
    assert all(p.default is not inspect.Parameter.empty for p in more)


def logits(rows: int, columns: int, scale: float = 3.0) -> torch.Tensor:
    return (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        * scale
    )


@pytest.mark.parametrize("columns", [2, 17, 1000])
@pytest.mark.parametrize("scale", [0.01, 3.0, 60.0])
def test_row_stats_against_float64(columns: int, scale: float) -> None:
    rows = logits(33, columns, scale)
    rows[::3, 1:2] = NEGATIVE_INFINITY
    slots = torch.zeros(33, dtype=torch.int64)
    stats = propose_rows(Reading(rows, slots, -1, want_ranking=True))
    p = torch.softmax(rows.double(), dim=-1)
    top = p.topk(2, dim=-1).values
    assert stats.entropy_T is not None and stats.margin_T is not None
    assert torch.equal(stats.token_T, p.argmax(dim=-1))
    torch.testing.assert_close(
        stats.confidence_T.double(), top[:, 0], rtol=1e-5, atol=1e-7
    )
    margin = top[:, 0] - top[:, 1]
    torch.testing.assert_close(stats.margin_T.double(), margin, rtol=1e-4, atol=1e-6)
    exact = (p * (p + 1e-10).log()).sum(dim=-1)
    torch.testing.assert_close(stats.entropy_T.double(), exact, rtol=1e-4, atol=1e-6)
    fast = propose_rows(Reading(rows, slots, -1))
    assert fast.entropy_T is None and fast.margin_T is None
    assert torch.equal(fast.token_T, stats.token_T)
    torch.testing.assert_close(
        fast.confidence_T, stats.confidence_T, rtol=1e-6, atol=1e-7
    )


def test_row_stats_ties_and_certainty() -> None:
    rows = torch.zeros(2, 5)
    rows[1, 1:] = NEGATIVE_INFINITY
    stats = propose_rows(Reading(rows, torch.zeros(2, dtype=torch.int64), -1))
    assert stats.token_T.tolist() == [0, 0]
    assert stats.confidence_T.tolist() == [pytest.approx(0.2), 1.0]


def test_confidence_of_given_tokens() -> None:
    p = torch.tensor([[0.1, 0.2, 0.7]]).repeat(3, 1)
    tokens = torch.tensor([0, 1, 2])
    stats = row_stats(p.log(), tokens, tokens, want_ranking=False)
    torch.testing.assert_close(stats.confidence_T, torch.tensor([0.1, 0.2, 0.7]))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62, -(2**63), 2**63 - 1])
def test_sampled_tokens_equal_their_definition(seed: int) -> None:
    """The largest of tempered logits and noise, computed in Python integers and float64."""
    rows, temperature = logits(6, 50, 2.0), 0.7
    slots = torch.zeros(6, dtype=torch.int64)
    offsets, step = torch.arange(6) * 1000, 999
    sampling = RowSampling(
        *(torch.tensor([x]) for x in (temperature, seed, step, 5)), offsets, 1
    )
    stats = propose_rows(Reading(rows, slots, -1, sampling))
    for row, position, token in zip(
        rows, (offsets + 6).tolist(), stats.token_T, strict=True
    ):
        noise = -(-counter_uniforms(seed & WIDE, position, step, 50).log()).log()
        assert int(token) == int((row.double() / temperature + noise).argmax())


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def test_counter_uniform_equals_its_definition() -> None:
    seeds = [0, 1, -1, 2**62, -(2**63), 2**63 - 1]
    for seed in seeds:
        for position in (0, 5, 131071):
            for step in (0, 1, 999):
                numbers = counter_uniform(*map(torch.tensor, (seed, position, step)))
                expected = plain_uniform(seed & WIDE, position, step)
                assert float(numbers) == np.float32(expected)


def test_counter_uniform_knows_no_batch() -> None:
    seed, position = torch.arange(50) - 25, torch.arange(50) * 7
    batch = counter_uniform(seed, position, torch.tensor(2))
    alone = [
        counter_uniform(s, p, torch.tensor(2))
        for s, p in zip(seed, position, strict=True)
    ]
    assert torch.equal(batch, torch.stack(alone))
    assert batch.dtype == torch.float32 and ((batch > 0) & (batch < 1)).all()
    assert counter_uniform(seed[:, None], position, torch.tensor(2)).shape == (50, 50)


@pytest.mark.parametrize("axis", range(3))
def test_counter_uniform_is_uniform_along_every_argument(axis: int) -> None:
    """And neighbours along it, or along two of them, are independent."""
    count, arguments = 65_536, [torch.tensor(11), torch.tensor(3), torch.tensor(2)]
    arguments[axis] = torch.arange(count)
    numbers = counter_uniform(*arguments).double().numpy()
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    assert abs(chi_square(counts, np.full(64, count / 64))) < 4
    pairs = np.histogram2d(numbers[:-1], numbers[1:], bins=16, range=[(0, 1)] * 2)[
        0
    ].ravel()
    assert abs(chi_square(pairs, np.full(256, (count - 1) / 256))) < 4
    for other in range(3):
        moved = list(arguments)
        moved[other] = moved[other] + 1
        neighbour = counter_uniform(*moved).double().numpy()
        assert abs(np.corrcoef(numbers, neighbour)[0, 1]) < 4 / np.sqrt(count)


def test_random_numbers_do_not_repeat() -> None:
    seed, position, step = torch.meshgrid(*[torch.arange(20)] * 3, indexing="ij")
    assert (
        counter_uniform(seed, position, step).unique().numel() > 7990
    )  # of 8000, in 24 bits


def test_blocks_against_loops() -> None:
    generator = torch.Generator().manual_seed(7)
    for length in (1, 3, 4):
        slots, positions = 3, 11
        score = torch.randint(0, 4, (20, positions), generator=generator).float()
        candidates = torch.rand(20, positions, generator=generator) < 0.5
        block = (torch.arange(positions) // length).clamp_max(slots).expand(20, -1)
        counts = per_block(candidates, block, slots)
        flags = torch.rand(20, slots, generator=generator) < 0.5
        spread, best = (
            at_positions(flags, block),
            candidates & (rank_in_block(score, candidates, block, slots) == 0),
        )
        ranks = rank(score, candidates)
        for r in range(20):
            mine = [p for p in range(positions) if candidates[r, p]]
            for s in range(slots):
                inside = [p for p in mine if block[r, p] == s]
                assert counts[r, s] == len(inside)
                top = max(
                    inside, key=lambda p, r=r: (float(score[r, p]), -p), default=None
                )
                assert [p for p in inside if best[r, p]] == (
                    [] if top is None else [top]
                )
            assert spread[r].tolist() == [
                bool(flags[r, s]) if s < slots else False for s in block[r].tolist()
            ]
            ordered = sorted(mine, key=lambda p, r=r: (-float(score[r, p]), p))
            assert [int(ranks[r, p]) for p in ordered] == list(range(len(mine)))


def test_leading() -> None:
    flags = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert leading(flags).tolist() == [2, 0, 4]


def test_only_rows_that_moved_are_written() -> None:
    table, rows = torch.zeros(4, 3), torch.arange(15.0).view(5, 3)
    moved = torch.tensor([True, False, True])
    move_rows_reference(
        rows, torch.tensor([4, 0, 1]), table, torch.tensor([2, 1, 0]), moved
    )
    assert table.tolist() == [[3, 4, 5], [0, 0, 0], [12, 13, 14], [0, 0, 0]]
