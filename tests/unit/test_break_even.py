"""Lengths of drafts near the break-even: what is lost beside plain steps, on numbers alone.

Steps take the times of an 8B model's graphs on an H100, and drafts more beside their graph.
"""

from collections import deque

import numpy as np
import pytest

from dllm_plugin.decoding.acceptance import (
    Drafted,
    tokens_of_round,
    tokens_of_stride,
)
from dllm_plugin.decoding.step_costs import MeasuredCosts, ObservedRatios
from dllm_plugin.decoding.widths import WidthController, doubled

POSITIONS = [1, 8, 32, 64, 128, 256, 512, 1024, 2048]
MS = [6.6, 6.75, 7.0, 7.15, 7.2, 8.4, 13.0, 25.0, 49.0]
PER_KEY, CONTEXT = 5.2e-5, 224
COUNTS = list(range(8, 129, 8))
ROWS = {tokens_of_round: doubled(16), tokens_of_stride: (1, 3, 7)}
LOADS = (1, 8, 32, 64, 128)


class Requests:
    """Requests whose drafts are accepted with one probability."""

    def __init__(self, count: int, seed: int) -> None:
        self.drafts = np.zeros(count, dtype=np.int64)
        self.rng = np.random.default_rng(seed)

    def step(self, drafted: Drafted, rows: int, share: float) -> int:
        """Return the tokens of a step of all requests."""
        waiting = self.drafts
        lucky = self.rng.geometric(1 - share, len(waiting)) - 1
        kept = np.minimum(lucky, np.minimum(waiting, rows - 1))
        if drafted is tokens_of_stride:
            self.drafts = np.where(kept == waiting, rows // 2, 0)
            return int((kept + 1).sum())
        verifies = (waiting > 0) | (rows == 1)
        self.drafts = np.where(verifies, 0, rows - 1)
        return int((kept + 1)[verifies].sum())


class Served:
    """One controller that serves loads and acceptances one after the other."""

    def __init__(self, drafted: Drafted, overhead: float) -> None:
        self.drafted, self.overhead = drafted, overhead
        self.rows = ROWS[drafted]
        graphs = {rows: COUNTS for rows in self.rows}
        self.costs = MeasuredCosts(POSITIONS, MS, PER_KEY, 1.0, graphs)
        self.controller = WidthController(self.rows, False, self.costs, drafted=drafted)

    def ms(self, requests: int, rows: int) -> float:
        """Return what a step takes: drafts more beside their graph."""
        beside = 0.15 + (rows > 1) * self.overhead * (1 + requests / 64)
        return self.costs.step(requests, rows, CONTEXT * requests) + beside

    def best(self, requests: int, share: float) -> float:
        """Return how fast the best length is, by plain steps."""
        plain = self.ms(requests, 1)
        return max(
            self.drafted(rows, share) * plain / self.ms(requests, rows)
            for rows in self.rows
        )

    def speed(self, requests: int, share: float) -> float:
        """Serve 250 steps after a few others; return how fast they were, by plain steps."""
        crowd, tokens, taken = Requests(requests, requests), 0, 0.0
        in_flight = deque[tuple[int, int, float]]()
        for step in range(300):
            rows = self.controller.width(requests, CONTEXT * requests)
            found = crowd.step(self.drafted, rows, share)
            ms = self.ms(requests, rows)
            ratio = ms / self.costs.step(requests, rows, CONTEXT * requests)
            in_flight.append((rows, found, ratio))
            if len(in_flight) > 1:
                rows, found_then, ratio = in_flight.popleft()
                self.controller.observe_time(requests, rows, ratio)
                self.controller.observe(rows, requests, found_then)
            if step >= 50:
                tokens += found
                taken += ms
        return tokens / requests / taken * self.ms(requests, 1)


@pytest.mark.parametrize("overhead", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("drafted", ROWS)
def test_little_is_lost_near_the_break_even(drafted: Drafted, overhead: float) -> None:
    """Steps are never 3 % slower than plain ones, and drafts that pay are taken."""
    served, drafting = Served(drafted, overhead), 0
    for accepted in (6, 4, 3, 2.6, 2.3, 2, 1.7, 1.4):
        share = 1 - 1 / accepted
        for requests in LOADS:
            speed, best = served.speed(requests, share), served.best(requests, share)
            assert speed >= 0.97, (accepted, requests, speed, best)
            if best >= 1.3:
                drafting += 1
                assert speed >= 0.9 * best, (accepted, requests, speed, best)
    assert drafting > 5


def test_plain_steps_have_a_ratio_of_their_own() -> None:
    """Until they were tried they take what their graph does, whatever drafts take."""
    ratios = ObservedRatios(plain_apart=True)
    for _ in range(8):
        ratios.observe(64, 2, 1.4)
    drafts = ratios.of(64, [1, 2])
    assert ratios.of(64, [0]) == [1.0] and drafts[0] == drafts[1] > 1.2
    ratios.observe(64, 0, 1.1)
    assert 1.0 < ratios.of(64, [0])[0] < 1.1
    assert ratios.of(64, [2]) == drafts[1:]


def test_drafts_that_almost_pay_are_tried_longer() -> None:
    """Refused ones are short, and few."""
    tried = {}
    for share in (0.05, 0.5):
        controller = Served(tokens_of_round, 0.0).controller
        for _ in range(2000):
            rows = controller.width(8, 0)
            controller.observe(rows, 8, round(8 * tokens_of_round(rows, share)))
        rows = [controller.width(8, 0) for _ in range(1024)]
        tried[share] = [length for length in rows if length > 1]
    assert max(tried[0.05]) <= 4 < max(tried[0.5])
    assert 0 < len(tried[0.05]) <= 4 * 6 < len(tried[0.5])
