"""Compare measured with predicted times of steps."""

import time
from collections import deque
from typing import NamedTuple

SMOOTHING = 1 / 64  # of steps
LEAST, MOST = 0.5, 2.0


class _Scheduled(NamedTuple):
    """A step in flight; `queued`: it waits for another step that computes something."""

    predicted_ms: float | None
    requests: int
    width: int
    queued: bool


class StepClock:
    """The ratio of observed to predicted times of steps.

    scale  that ratio, an exponential mean over steps of all widths, for `/metrics`
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._in_flight: deque[_Scheduled] = deque()
        self._last: float | None = None

    def scheduled(self, predicted_ms: float | None, requests: int, width: int) -> None:
        """Add a step; a time of None excludes it, as it has a prompt."""
        queued = bool(self._in_flight) and self._in_flight[-1].requests > 0
        self._in_flight.append(_Scheduled(predicted_ms, requests, width, queued))

    def finished(self) -> tuple[int, int, float] | None:
        """Return requests, width and time ratio of the oldest step, if it was queued."""
        now, before = time.perf_counter(), self._last
        self._last = now
        if not self._in_flight:
            return None
        step = self._in_flight.popleft()
        if step.predicted_ms is None or not step.queued or before is None:
            return None
        ratio = 1000 * (now - before) / step.predicted_ms
        self.scale += SMOOTHING * (min(max(ratio, LEAST), MOST) - self.scale)
        return step.requests, step.width, ratio
