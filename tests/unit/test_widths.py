"""The choice of widths: costs, acceptance, hysteresis and convergence, on numbers alone."""

import time

import numpy as np
import pytest

from dllm_plugin.decoding.acceptance import (
    Drafted,
    accepted,
    tokens_of_round,
    tokens_of_stride,
    tokens_per_forward,
)
from dllm_plugin.decoding.step_costs import (
    READS,
    Costs,
    MeasuredCosts,
    ObservedRatios,
    StepCosts,
)
from dllm_plugin.decoding.widths import (
    CYCLE,
    WidthController,
    choose,
    doubled,
    widths_between,
)

H200 = Costs(base=4.6, free=128, per_position=0.0215)
LOADS = (1, 4, 8, 16, 32, 64, 128, 256)
CHOSEN = {
    ("throughput", False): (32, 32, 16, 8, 4, 4, 2, 2),
    ("throughput", True): (32, 32, 16, 8, 4, 2, 1, 1),
    ("balanced", False): (32, 32, 16, 8, 8, 6, 4, 3),
    ("balanced", True): (32, 32, 16, 8, 6, 4, 1, 1),
}


def rates(requests: int, widths: tuple[int, ...], shift: bool) -> np.ndarray:
    tokens = [tokens_per_forward(width, 0.9, 2.5, shift) for width in widths]
    times = [H200.step(requests, width, 0) for width in widths]
    return requests * np.array(tokens) / np.array(times)


@pytest.mark.parametrize(("mode", "shift"), CHOSEN)
def test_widths_by_load(mode: str, shift: bool) -> None:
    widths = widths_between(1 if shift else 2, 32)
    for requests, wanted in zip(LOADS, CHOSEN[mode, shift], strict=True):
        promised = rates(requests, widths, shift)
        assert widths[choose(promised, None, mode == "balanced")] == wanted, requests
    narrow = widths_between(4, 32)
    assert narrow[choose(rates(256, narrow, shift), None, False)] == 4


def test_tokens_per_forward() -> None:
    """Within what a width can bring, growing with it, and what its masks accept."""
    for shift in (False, True):
        for p0 in (0.3, 0.9):
            got = [tokens_per_forward(width, p0, 2.5, shift) for width in range(2, 129)]
            assert (np.diff(got) > -1e-9).all() and got[0] >= 1
            for width, tokens in zip(range(2, 129), got, strict=True):
                bound = accepted(width - tokens + shift, p0, 2.5)
                assert tokens == pytest.approx(max(1.0, bound), abs=1e-6)
    assert (
        tokens_per_forward(1, 0.9, 4, False) == 0.5
        and tokens_per_forward(1, 0.9, 4, True) == 1
    )


class Requests:
    """Requests whose masks are accepted with a probability that falls with their rank."""

    def __init__(self, count: int, shift: bool, seed: int = 0) -> None:
        self.decided = np.zeros((count, 160), dtype=bool)
        self.shift, self.rng = shift, np.random.default_rng(seed)

    def step(self, width: int, p0: float, lam: float) -> int:
        """Run one step of all; return the tokens that it committed."""
        place = np.arange(160)
        run = np.minimum((~self.decided).argmax(axis=1), width)
        masks = ~self.decided & (place < width + self.shift) & (place >= run[:, None])
        rank = masks.cumsum(axis=1) - 1
        take = masks & (self.rng.random(masks.shape) < p0 * np.exp(-rank / lam))
        stuck = ~take.any(axis=1) & masks.any(axis=1)
        take[stuck, masks.argmax(axis=1)[stuck]] = True
        self.decided |= take
        moved = place + run[:, None]
        kept = np.take_along_axis(self.decided, np.minimum(moved, 159), axis=1)
        self.decided = kept & (moved < 160)
        return int(run.sum())


def true_rates(
    widths: tuple[int, ...], shift: bool, truth: tuple[float, float], requests: int = 64
) -> dict[int, float]:
    """What each width really brings so many requests, in proportion."""
    rate = {}
    for width in widths:
        crowd = Requests(64, shift, 2)
        tokens = sum(crowd.step(width, *truth) for _ in range(200)) / 200
        rate[width] = tokens / H200.step(requests, width, 0)
    return rate


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("truth", [(0.9, 2.5), (0.5, 1.5)])
def test_the_best_width_is_found(truth: tuple[float, float], shift: bool) -> None:
    widths = widths_between(1 if shift else 2, 32)
    controller, requests = WidthController(widths, shift, H200), Requests(64, shift)
    for _ in range(400):
        width = controller.width(64, 0)
        controller.observe(width, 64, requests.step(width, *truth))
    rate = true_rates(widths, shift, truth)
    best = max(widths, key=lambda w: rate[w])
    assert controller.current is not None
    chosen = controller.widths[controller.current]
    assert abs(widths.index(chosen) - widths.index(best)) <= 1
    assert rate[chosen] >= 0.95 * rate[best]


def test_a_change_of_acceptance_is_followed() -> None:
    widths = widths_between(2, 32)
    controller, requests = WidthController(widths, False, H200), Requests(64, False)
    for truth in ((0.97, 12.0), (0.4, 0.7), (0.97, 12.0)):
        for _ in range(2000):
            width = controller.width(64, 0)
            controller.observe(width, 64, requests.step(width, *truth))
        rate = true_rates(widths, False, truth)
        assert controller.current is not None
        assert rate[widths[controller.current]] >= 0.95 * max(rate.values()), truth


# Dream-7B on an H200, 256 requests of 640 tokens: what graphs take, and steps at least on the host.
GRAPHS_MS, HOST_MS, BESIDE_MS = (
    {1: 9.5, 2: 15.3, 3: 20.5, 4: 25.7, 6: 37.5, 8: 49.4},
    15.2,
    1.8,
)


@pytest.mark.parametrize(
    "wrong", [{}, {6: 0.5, 8: 0.4}, {1: 2.0, 2: 2.0, 3: 1.6}], ids=str
)
@pytest.mark.parametrize("clock", [True, False])
def test_times_of_steps_correct_their_costs(
    clock: bool, wrong: dict[int, float]
) -> None:
    """What graphs leave out, and what disturbed their measuring, would lead to a worse width."""
    truth, rng = (0.91, 2.5), np.random.default_rng(5)
    true_ms = {width: max(HOST_MS, ms + BESIDE_MS) for width, ms in GRAPHS_MS.items()}
    given = [ms * wrong.get(width, 1.0) for width, ms in GRAPHS_MS.items()]
    costs = MeasuredCosts([256 * width for width in GRAPHS_MS], given, 0.0, 1.0, {})
    controller = WidthController(tuple(GRAPHS_MS), True, costs)
    crowd = Requests(64, True)
    for _ in range(1500):
        width = controller.width(256, 0)
        controller.observe(width, 64, crowd.step(width, *truth))
        if clock:  # now and then something holds a step up
            late = 10.0 if rng.random() < 0.01 else 0.0
            observed = true_ms[width] * rng.uniform(0.9, 1.1) + late
            controller.observe_time(256, width, observed / costs.step(256, width, 0))
    rate = {width: 1 / ms for width, ms in true_ms.items()}
    for width in rate:
        crowd = Requests(64, True, 2)
        rate[width] *= sum(crowd.step(width, *truth) for _ in range(200))
    assert controller.current is not None
    found = rate[controller.widths[controller.current]] / max(rate.values())
    assert found >= 0.97 if clock else found < 0.95


def test_ratios_of_widths() -> None:
    ratios = ObservedRatios()

    def every(requests: int) -> list[float]:
        return ratios.of(requests, range(3))

    assert every(64) == [1.0, 1.0, 1.0]
    for _ in range(600):
        ratios.observe(64, 1, 1.2)
    assert every(64) == pytest.approx([1.2] * 3, rel=1e-3)  # others as the nearest
    assert every(127) == every(64)
    assert every(63) == every(128) == [1.0] * 3  # of other loads
    ratios.observe(64, 1, 100.0)  # held up
    assert every(64)[1] == pytest.approx(1.2, rel=0.01)
    ratios.observe(64, 2, 0.9)
    assert 0.9 < every(64)[2] < 1.2 and every(64)[0] == every(64)[1]
    for _ in range(600):
        ratios.observe(64, 0, 1.0)
    assert every(64)[2] == every(64)[1] > 1.1  # not tried lately, so as the nearest


@pytest.mark.parametrize("requests", [1, 64])
def test_a_time_when_all_is_slow_leaves_nothing(requests: int) -> None:
    """Widths and ratios are right again, soon after it has ended."""
    truth, rng = (0.91, 2.5), np.random.default_rng(6)
    widths = widths_between(2, 32)
    controller, crowd = WidthController(widths, False, H200), Requests(requests, False)
    for slowed, steps in ((1.0, 600), (2.0, 300), (1.0, 1500)):
        for _ in range(steps):
            width = controller.width(requests, 0)
            controller.observe(width, requests, crowd.step(width, *truth))
            controller.observe_time(requests, width, slowed * rng.uniform(0.95, 1.05))
    rate = true_rates(widths, False, truth, requests)
    assert controller.current is not None
    assert rate[widths[controller.current]] >= 0.95 * max(rate.values())
    assert controller.ratios.of(requests, range(len(widths))) == pytest.approx(
        [1.0] * len(widths), rel=0.1
    )


def blocks(
    requests: int, length: int, costs: Costs, truth: tuple[float, float]
) -> float:
    """What the usual blocks bring: one commits together with the next, or alone, where many run."""
    rng, together = np.random.default_rng(3), requests * length < 128
    decided, tokens = np.zeros((requests, length), dtype=bool), 0
    for _ in range(120):
        done = decided.all(axis=1)
        tokens += length * int(done.sum())
        decided[done] = False
        masks = ~decided & (together | ~done[:, None])
        rank = masks.cumsum(axis=1) - 1
        take = masks & (rng.random(masks.shape) < truth[0] * np.exp(-rank / truth[1]))
        stuck = ~take.any(axis=1) & masks.any(axis=1)
        take[stuck, masks.argmax(axis=1)[stuck]] = True
        decided |= take
    return (
        tokens
        / 120
        / costs.step(requests, length * (2 if together else 1), 640 * requests)
    )


@pytest.mark.parametrize("narrowest", [2, 8])
@pytest.mark.parametrize("truth", [(0.91, 2.5), (0.95, 7.0), (0.6, 1.5)])
def test_no_load_is_slower_than_blocks(
    truth: tuple[float, float], narrowest: int
) -> None:
    """By more than a hundredth, with keys that cost little or much, and with what trials cost."""
    for per_key, length in ((1.2e-5, 16), (1.2e-4, 16), (1.2e-5, 32)):
        costs = Costs(H200.base, H200.free, H200.per_position, per_key, READS)
        for count in (1, 8, 32, 256):
            controller = WidthController(
                widths_between(narrowest, length), False, costs
            )
            # So many stand for all of them.
            few, crowd, tokens, taken = 16, Requests(16, False), 0.0, 0.0
            for step in range(250):
                width = controller.width(count, 640 * count)
                committed = crowd.step(width, *truth)
                controller.observe(width, few, committed)
                if step >= 100:
                    tokens += committed * count / few
                    taken += costs.step(count, width, 640 * count)
            assert tokens / taken >= 0.99 * blocks(count, length, costs, truth), count


def test_few_changes_at_a_border() -> None:
    """One request more or less does not turn the width back and forth."""
    controller, requests = (
        WidthController(widths_between(2, 32), False, H200),
        Requests(64, False),
    )
    for step in range(1000):
        width = controller.width(63 + step % 2, 0)
        controller.observe(width, 64, requests.step(width, 0.9, 2.5))
    assert controller.changes < 20


def test_trials() -> None:
    """Six of 64 steps use the width beside, never outside of the limits, never for one request."""
    controller = WidthController((4, 8), False, Costs())
    used = [controller.width(2, 0) for _ in range(256)]
    assert used.count(4) == 12 and set(used) == {4, 8}  # 8 has no wider one
    alone = WidthController((4, 8), False, Costs())
    assert {alone.width(1, 0) for _ in range(256)} == {8}


def test_what_is_learned() -> None:
    """Nothing from the two steps behind a change of width."""
    controller = WidthController((4, 8), False, Costs())
    before = controller.acceptance.steps.copy()
    for width in (8, 8, 4, 4, 8, 8):
        controller.observe(width, 10, 20)
    assert (controller.acceptance.steps == before).all()
    controller.observe(8, 10, 20)
    assert (controller.acceptance.steps - before).tolist() == [0, 10]
    for _ in range(5000):
        controller.observe(8, 10, 20)
    assert controller.acceptance.steps.sum() <= 20_000 + 10


@pytest.mark.parametrize("measured", [False, True])
def test_a_choice_costs_little(measured: bool) -> None:
    """Of host time, at 256 requests: less than 20 us a step, or 30 where cores are slow."""
    sizes = range(8, 1025, 8)
    costs: StepCosts = Costs(per_key=1e-6, reads=2.0)
    if measured:
        graphs = {width: list(range(8, 257, 8)) for width in (2, 4, 8)}
        costs = MeasuredCosts(sizes, [4 + n / 50 for n in sizes], 1e-6, 2.0, graphs)
    widths = widths_between(2, 32)
    captured = {256: [width in (2, 4, 6, 8) for width in widths]} if measured else None
    controller, taken = WidthController(widths, False, costs, allowed=captured), []
    for _ in range(10):
        begin = time.thread_time()
        for _ in range(10 * CYCLE):
            width = controller.width(256, 200_000)
            controller.observe(width, 256, 500)
            controller.observe_time(256, width, 1.1)
        taken.append((time.thread_time() - begin) / (10 * CYCLE))
    assert min(taken) < 30e-6


ROUNDS, STRIDES = doubled(32), tuple(2 * length - 1 for length in doubled(16))


def drafts_controller(drafted: Drafted) -> WidthController:
    rows = ROUNDS if drafted is tokens_of_round else STRIDES
    return WidthController(rows, False, H200, drafted=drafted)


def serve_drafts(
    controller: WidthController, drafted: Drafted, share: float, requests: int
) -> list[int]:
    """Rows of 2,048 steps in which drafts are accepted with one probability."""
    chosen, left = [], 0.0
    for _ in range(2048):
        rows = controller.width(requests, 0)
        left += requests * drafted(rows, share)
        controller.observe(rows, requests, int(left))
        left -= int(left)
        chosen.append(rows)
    return chosen


def test_lengths_of_drafts_are_powers_of_two() -> None:
    assert doubled(1) == (1,)
    assert doubled(12) == (1, 2, 4, 8, 12)
    assert ROUNDS == (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("drafted", [tokens_of_round, tokens_of_stride])
def test_one_row_brings_a_token_and_sure_drafts_all(drafted: Drafted) -> None:
    assert drafted(1, 0.5) == 1.0
    for rows in ROUNDS if drafted is tokens_of_round else STRIDES[1:]:
        found = [drafted(rows, share) for share in (0.0, 0.3, 0.6, 0.9, 1.0)]
        assert found == sorted(found)
    assert tokens_of_round(8, 1.0) == 4.0
    # N tokens in one forward if all are accepted; of two, one verifies nothing if none is.
    assert tokens_of_stride(7, 1.0) == 4.0 and tokens_of_stride(7, 0.0) == 1.0


@pytest.mark.parametrize("requests", [8, 64, 128])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("drafted", [tokens_of_round, tokens_of_stride])
def test_the_length_that_pays_is_found(
    drafted: Drafted, share: float, requests: int
) -> None:
    controller = drafts_controller(drafted)
    serve_drafts(controller, drafted, share, requests)
    rates = {
        rows: drafted(rows, share) / H200.step(requests, rows, 0)
        for rows in controller.widths
    }
    assert controller.current is not None
    found = rates[controller.widths[controller.current]]
    assert found >= 0.95 * max(rates.values())


@pytest.mark.parametrize("requests", [1, 128])
@pytest.mark.parametrize("drafted", [tokens_of_round, tokens_of_stride])
def test_drafts_are_given_up_and_taken_up_again(
    drafted: Drafted, requests: int
) -> None:
    """Where none pay, few steps draft: what is tried costs less than 3 % of plain steps."""
    controller = drafts_controller(drafted)
    refused = serve_drafts(controller, drafted, 0.05, requests)[256:]
    drafts = sum(rows > 1 for rows in refused)
    if drafted is tokens_of_round or requests > 1:
        assert 0 < drafts <= 0.03 * len(refused)
    accepted_again = serve_drafts(controller, drafted, 0.97, requests)[-200:]
    assert requests > 1 or min(accepted_again) > 1
