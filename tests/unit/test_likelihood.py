"""Estimates of log-likelihoods: counts of masks, positions, sums and errors."""

import math

import numpy as np
import pytest
import torch

from dllm_plugin.api.likelihood import METHODS, estimate, mask_counts, monte_carlo


@pytest.mark.parametrize("length", [1, 2, 3, 6, 7, 13, 64, 250])
@pytest.mark.parametrize("samples", [1, 2, 4, 6, 7, 32, 128])
def test_counts_are_those_of_lladas_estimate(length: int, samples: int) -> None:
    """As its paper's code spreads them in a batch, whatever it starts with."""
    for first in {1, length // 2 + 1, length}:
        step = length / samples
        exact = [first + j * step for j in range(samples)]
        spread = torch.linspace(float(first), exact[-1], steps=samples)
        expected = ((torch.round(spread).to(torch.int64) - 1) % length) + 1
        counts = mask_counts(length, samples, first)
        assert counts == expected.tolist()
        assert min(counts) >= 1 and max(counts) <= length
        # Evenly: no count comes twice as often as another, or one more.
        often = [counts.count(n) for n in range(1, length + 1)]
        assert max(often) - min(often) <= 2
        assert all(
            abs((c - round(e)) % length) in (0, 1, length - 1)
            for c, e in zip(counts, exact, strict=True)
        )


def test_positions_depend_only_on_seed_and_sample() -> None:
    few, many = monte_carlo(20, 8, seed=3), monte_carlo(20, 8, seed=3)
    assert few == many != monte_carlo(20, 8, seed=4)
    for one in few:
        assert list(one.masked) == sorted(set(one.masked)) and one.counted == len(
            one.masked
        )
        assert one.weight == 20 / len(one.masked)
    often = np.zeros(20)
    for seed in range(300):
        for one in monte_carlo(20, 8, seed):
            often[list(one.masked)] += 1
    assert often.min() > 0.9 * often.mean(), "no position is preferred"
    starts = {len(monte_carlo(20, 8, seed)[0].masked) for seed in range(300)}
    assert starts == set(range(1, 21))


def test_one_token_takes_one_forward() -> None:
    """And then every method says the same."""
    for method, draw in METHODS.items():
        samples = draw(1, 128, 0)
        assert [one.masked for one in samples] == [(0,)]
        assert estimate(method, samples, [[-1.25]]) == (-1.25, None)


def independent(tokens: list[float], method: str, samples: int = 512) -> float:
    """The estimate where no token depends on another: every method has to find the sum."""
    drawn = METHODS[method](len(tokens), samples, 0)
    return estimate(
        method, drawn, [[tokens[i] for i in one.masked] for one in drawn]
    ).logprob


@pytest.mark.parametrize("method", METHODS)
def test_sums_of_independent_tokens(method: str) -> None:
    same = [-0.5] * 12
    assert independent(same, method) == pytest.approx(-6)
    tokens = [-0.1 * i for i in range(12)]
    assert independent(tokens, method) == pytest.approx(sum(tokens), rel=0.05)


def test_errors() -> None:
    """The standard error of a mean, and none where nothing was drawn."""
    drawn = monte_carlo(4, 4, 0)
    scored = [[-1.0 - 0.1 * number] * one.counted for number, one in enumerate(drawn)]
    values = 4 * np.array([-1.0, -1.1, -1.2, -1.3])
    found = estimate("monte_carlo", drawn, scored)
    assert found.logprob == pytest.approx(values.mean())
    assert found.standard_error == pytest.approx(values.std(ddof=1) / 2)
    assert estimate("monte_carlo", drawn[:1], scored[:1]).standard_error is None
    chain = METHODS["left_to_right"](3, 0, 0)
    told = estimate("left_to_right", chain, [[-1, -9, -9], [-2, -9], [-4]])
    assert told == (-7, None) and math.isfinite(told.logprob)
