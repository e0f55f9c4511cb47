"""Where canvases lie, what each pass computes, guided pairs, and LLaDA's noise."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dllm_plugin.decoding.families import LLADA
from dllm_plugin.decoding.full_attention import bounds
from dllm_plugin.decoding.methods import methods_of
from dllm_plugin.kernels.confidence.random_numbers import (
    counter_uniform,
    gumbel_uniform,
    sampled_order,
)
from dllm_plugin.sampling import guidance


def place(prompt: int, start: int, end: int, length: int, canvas: int, context: int) -> Any:
    found = bounds(
        np.array(prompt), np.array(start), np.array(end), np.array(length), canvas, context
    )
    return tuple(int(part) for part in found)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # prompt, start, end, block, canvas, context -> first, start, block_stop, stop
        ((10, 10, 42, 16, 64, 100), (10, 10, 26, 42)),
        ((10, 26, 42, 16, 64, 100), (10, 26, 42, 42)),
        ((10, 10, 43, 16, 64, 100), (10, 10, 26, 58)),  # rounded up to whole blocks
        ((10, 10, 43, 16, 64, 50), (10, 10, 26, 50)),  # but not beyond the context
        ((10, 42, 43, 16, 64, 50), (10, 42, 50, 50)),
        ((10, 10, 110, 16, 64, 200), (10, 10, 26, 74)),  # canvas by canvas
        ((10, 74, 110, 16, 64, 200), (74, 74, 90, 122)),
        ((10, 90, 110, 16, 64, 200), (74, 90, 106, 122)),
        ((10, 10, 110, 24, 64, 200), (10, 10, 34, 58)),  # 64 holds two whole blocks of 24
        ((10, 58, 110, 24, 64, 200), (58, 58, 82, 106)),
        ((10, 106, 110, 24, 64, 200), (106, 106, 130, 130)),
    ],
)
def test_bounds(given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert place(*given) == wanted


def test_bounds_of_many_requests_at_once() -> None:
    rng = np.random.default_rng(0)
    prompt, length = rng.integers(1, 30, 200), rng.integers(1, 20, 200)
    start = prompt + length * rng.integers(0, 5, 200)
    end = start + rng.integers(1, 60, 200)
    many = bounds(prompt, start, end, length, 40, 90)
    for i in range(200):
        row = (int(prompt[i]), int(start[i]), int(end[i]), int(length[i]), 40, 90)
        assert tuple(int(part[i]) for part in many) == place(*row)


def test_spans_are_those_of_the_design() -> None:
    given = (np.array(pair) for pair in ([5, 10], [13, 26], [37, 42], [8, 16]))
    canvas = bounds(*given, 64, 100)
    cached = np.array([[False, False], [True, False], [False, True]])
    spans = {
        name: [[part.tolist() for part in span(canvas, keeps)] for keeps in cached]
        for name, method in methods_of(LLADA).items()
        if (span := method.span) is not None
    }
    refresh = [[0, 0], [37, 42]]
    assert spans == {
        "semi_autoregressive": [refresh] * 3,
        "prefix_cache": [refresh, [[13, 0], [37, 42]], [[0, 26], [37, 42]]],
        "dual_cache": [refresh, [[13, 0], [21, 42]], [[0, 26], [37, 42]]],
    }


def test_pairs_in_a_batch() -> None:
    """Only leaders decide; who has no partner is its own."""
    batch = ["b", guidance.unconditional_id("a"), "a", "c"]
    leaders, partners = guidance.pair_requests(batch)
    assert (leaders.tolist(), partners.tolist()) == ([0, 2, 3], [0, 1, 3])
    assert guidance.guided_pairs(batch).tolist() == [[2, 1]]
    alone = ["b", guidance.unconditional_id("a")]
    assert guidance.guided_pairs(alone).tolist() == []
    for rows in guidance.pair_requests(["b", "c"]):
        assert rows.tolist() == [0, 1]


def test_partners_lose_the_prompt_of_their_canvas() -> None:
    starts = np.array([0, 30, 50, 90])
    rows = guidance.context_rows(starts, np.array([1, 2]), np.array([3, 2]))
    assert rows.tolist() == [30, 31, 32, 50, 51]
    assert guidance.context_rows(starts, np.array([], dtype=np.int64), np.array([])).tolist() == []


def test_guided_logits() -> None:
    """u + (w + 1)(l - u) in guided rows; the others as they are."""
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    guided = torch.tensor([False, True, False, True])
    mixed = guidance.GuidedRows(guided, torch.tensor([0.5, 2.0])).combine(logits, 4)
    torch.testing.assert_close(mixed[0], logits[0])
    torch.testing.assert_close(mixed[2], logits[2])
    torch.testing.assert_close(mixed[1], logits[4] + 1.5 * (logits[1] - logits[4]))
    torch.testing.assert_close(mixed[3], logits[5] + 3.0 * (logits[3] - logits[5]))


def test_noise_is_uniform_and_its_own() -> None:
    """Every (seed, position, step, token) draws its own number, whatever the batch."""
    seed, position, step = torch.tensor([3, 3, 4, 3]), torch.tensor([5, 6, 5, 5]), torch.zeros(4)
    uniform = gumbel_uniform(seed, position, step.long(), 20_000)
    assert uniform.dtype == torch.float64
    assert uniform.min() > 0 and uniform.max() < 1
    assert uniform.mean(dim=1).sub(0.5).abs().max() < 5 / math.sqrt(12 * 20_000)
    assert torch.equal(uniform[0], uniform[3])
    for other in (1, 2):
        assert (uniform[0] == uniform[other]).sum() == 0
        assert abs(torch.corrcoef(uniform[[0, other]])[0, 1]) < 0.03
    alone = gumbel_uniform(seed[1:2], position[1:2], step[1:2].long(), 7)
    assert torch.equal(alone[0], uniform[1, :7])


def test_gumbel_noise_samples_the_softmax() -> None:
    """A chi-square of 40,000 draws at temperature 0.7 against the tempered distribution."""
    logits, draws = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.0], dtype=torch.float64), 40_000
    seed = torch.arange(draws)
    noise = -(-gumbel_uniform(seed, seed * 0 + 9, seed * 0, 5).log()).log()
    counts = (logits / 0.7 + noise).argmax(dim=1).bincount(minlength=5)
    expected = draws * (logits / 0.7).softmax(0)
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # 99.9 % of 4 degrees


def test_alg_temp_draws_positions_without_replacement() -> None:
    """First and second pick of Dream's ``multinomial(softmax(score / alg_temp), 2)``."""
    score, draws = torch.tensor([0.9, 0.5, 0.7, 0.2]), 40_000
    step = torch.arange(draws)[:, None]
    uniform = counter_uniform(torch.tensor(3), torch.arange(4)[None, :], step)
    order = sampled_order(score.expand(draws, 4), torch.tensor(0.3), uniform).argsort(1).flip(1)
    first = (score.double() / 0.3).softmax(0)
    second = torch.stack([first * p / (1 - p) for p in first]) * (1 - torch.eye(4))
    expected = draws * second.flatten()[~torch.eye(4, dtype=torch.bool).flatten()]
    counts = (order[:, 0] * 4 + order[:, 1]).bincount(minlength=16)
    counts = counts[~torch.eye(4, dtype=torch.bool).flatten()]
    assert int(counts.sum()) == draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.3  # 99.9 % of 11 degrees
    kept = sampled_order(score, torch.zeros(4), torch.full((4,), 0.5))
    assert torch.equal(kept, score)
