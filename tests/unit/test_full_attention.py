"""Where canvases lie, what each pass computes, guided pairs, and LLaDA's noise."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dllm_plugin import default_model
from dllm_plugin.config.worker_carriers import pack_unconditional
from dllm_plugin.decoding.families import LLADA
from dllm_plugin.decoding.full_attention import NO_LIMIT, Layout, bounds
from dllm_plugin.decoding.methods import methods_of
from dllm_plugin.kernels.confidence.reference import (
    counter_uniform,
    gumbel_uniform,
    sampled_order,
)
from dllm_plugin.sampling import guidance


def layout(prompt: Any, end: Any, length: Any, *approximate: int) -> Layout:
    """Exact, unless the last three numbers are given."""
    numbers = approximate or (1, NO_LIMIT, NO_LIMIT)
    return Layout(*map(np.array, (prompt, end, length, *numbers)))


def place(
    prompt: int, start: int, end: int, length: int, canvas: int, context: int
) -> Any:
    found = bounds(layout(prompt, end, length), np.array(start), canvas, context)
    return tuple(int(part) for part in found[:4])


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
        (
            (10, 10, 110, 24, 64, 200),
            (10, 10, 34, 58),
        ),  # 64 holds two whole blocks of 24
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
    many = bounds(layout(prompt, end, length), start, 40, 90)
    for i in range(200):
        row = (int(prompt[i]), int(start[i]), int(end[i]), int(length[i]), 40, 90)
        assert tuple(int(part[i]) for part in many[:4]) == place(*row)
    assert not many.refresh.any()


@pytest.mark.parametrize(
    ("given", "start", "wanted"),
    [
        # every, before, window -> refresh, stop; a prompt of 10, an answer of 64 in blocks of 8
        ((1, 5, NO_LIMIT), 26, (0, 74)),
        ((2, 5, NO_LIMIT), 10, (0, 74)),
        ((2, 5, NO_LIMIT), 18, (13, 74)),
        ((2, 5, NO_LIMIT), 26, (0, 74)),
        ((2, 0, NO_LIMIT), 18, (18, 74)),
        ((3, 90, NO_LIMIT), 26, (0, 74)),  # farther than there is text
        ((3, NO_LIMIT, NO_LIMIT), 26, (10, 74)),  # from the start of the answer
        ((1, NO_LIMIT, 0), 26, (0, 34)),
        ((1, NO_LIMIT, 13), 26, (0, 47)),
        ((1, NO_LIMIT, 50), 26, (0, 74)),
        ((4, 8, 8), 66, (58, 74)),
    ],
)
def test_refreshes_that_cost_less(
    given: tuple[int, ...], start: int, wanted: tuple[int, int]
) -> None:
    found = bounds(layout(10, 74, 8, *given), np.array(start), 64, 100)
    assert (int(found.refresh), int(found.stop)) == wanted


def test_counting_of_refreshes_goes_on_from_canvas_to_canvas() -> None:
    starts = np.arange(10, 74, 8)
    found = bounds(layout(10, 74, 8, 3, 4, NO_LIMIT), starts, 20, 100)
    assert found.first.tolist() == [10, 10, 26, 26, 42, 42, 58, 58]
    assert found.refresh.tolist() == [0, 14, 22, 0, 38, 46, 0, 62]


def test_spans_are_those_of_the_design() -> None:
    canvas = bounds(layout([5, 10], [37, 42], [8, 16]), np.array([13, 26]), 64, 100)
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
    batch = ["b", pack_unconditional("a"), "a", "c"]
    leaders, partners = guidance.pair_requests(batch)
    assert (leaders.tolist(), partners.tolist()) == ([0, 2, 3], [0, 1, 3])
    alone = ["b", pack_unconditional("a")]
    for rows in guidance.pair_requests(alone):
        assert rows.tolist() == [0]
    for rows in guidance.pair_requests(["b", "c"]):
        assert rows.tolist() == [0, 1]


def test_partners_lose_the_prompt_of_their_canvas() -> None:
    starts = np.array([0, 30, 50, 90])
    rows = guidance.context_rows(starts, np.array([1, 2]), np.array([3, 2]))
    assert rows.tolist() == [30, 31, 32, 50, 51]
    assert (
        guidance.context_rows(
            starts, np.array([], dtype=np.int64), np.array([])
        ).tolist()
        == []
    )


def test_guided_logits() -> None:
    """u + (w + 1)(l - u) in guided rows; the others as they are."""
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    guided = torch.tensor([1, 3])
    mixed = guidance.GuidedRows(guided, torch.tensor([0.5, 2.0])).combine(logits, 4)
    torch.testing.assert_close(mixed[0], logits[0])
    torch.testing.assert_close(mixed[2], logits[2])
    torch.testing.assert_close(mixed[1], logits[4] + 1.5 * (logits[1] - logits[4]))
    torch.testing.assert_close(mixed[3], logits[5] + 3.0 * (logits[3] - logits[5]))


def test_noise_is_uniform_and_its_own() -> None:
    """Every (seed, position, step, token) draws its own number, whatever the batch."""
    seed, position, step = (
        torch.tensor([3, 3, 4, 3]),
        torch.tensor([5, 6, 5, 5]),
        torch.zeros(4),
    )
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
    logits, draws = (
        torch.tensor([1.0, 0.2, -0.5, 2.0, 0.0], dtype=torch.float64),
        40_000,
    )
    seed = torch.arange(draws)
    noise = -(-gumbel_uniform(seed, seed * 0 + 9, seed * 0, 5).log()).log()
    counts = (logits / 0.7 + noise).argmax(dim=1).bincount(minlength=5)
    expected = draws * (logits / 0.7).softmax(0)
    assert (
        float(((counts - expected) ** 2 / expected).sum()) < 18.5
    )  # 99.9 % of 4 degrees


def test_alg_temp_draws_positions_without_replacement() -> None:
    """First and second pick of Dream's ``multinomial(softmax(score / alg_temp), 2)``."""
    score, draws = torch.tensor([0.9, 0.5, 0.7, 0.2]), 40_000
    step = torch.arange(draws)[:, None]
    uniform = counter_uniform(torch.tensor(3), torch.arange(4)[None, :], step)
    order = (
        sampled_order(score.expand(draws, 4), torch.tensor(0.3), uniform)
        .argsort(1)
        .flip(1)
    )
    first = (score.double() / 0.3).softmax(0)
    second = torch.stack([first * p / (1 - p) for p in first]) * (1 - torch.eye(4))
    expected = draws * second.flatten()[~torch.eye(4, dtype=torch.bool).flatten()]
    counts = (order[:, 0] * 4 + order[:, 1]).bincount(minlength=16)
    counts = counts[~torch.eye(4, dtype=torch.bool).flatten()]
    assert int(counts.sum()) == draws
    assert (
        float(((counts - expected) ** 2 / expected).sum()) < 31.3
    )  # 99.9 % of 11 degrees
    kept = sampled_order(score, torch.zeros(4), torch.full((4,), 0.5))
    assert torch.equal(kept, score)


ADAPTED = {"strategy": "d2f", "lora_path": default_model.adapter_path()}


@pytest.mark.parametrize(
    ("folder", "dllm", "times"),
    [
        ("tiny-llada", {"strategy": "block_diffusion"}, 1),
        ("tiny-dream", {"strategy": "d2f"}, 1),
        ("tiny-llada", {}, 0),
        ("tiny-sdar", {"strategy": "block_diffusion"}, 0),
        ("bundled", ADAPTED, 0),
    ],
)
def test_blocks_without_training_for_them_are_warned_of(
    folder: str,
    dllm: dict[str, Any],
    times: int,
    vllm_config_for: Callable[..., Any],
    checkpoints: Path,
    logged: list[str],
) -> None:
    path = Path(default_model.path()) if folder == "bundled" else checkpoints / folder
    vllm_config_for(path, additional_config={"dllm": dllm})
    assert sum("instead of 77.5 %" in text for text in logged) == times
