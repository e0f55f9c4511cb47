"""Compare how long steps take with how long their costs say."""

import time
from collections import deque
from typing import NamedTuple

SMOOTHING = 1 / 64  # of steps
LEAST, MOST = 0.5, 2.0


class _Scheduled(NamedTuple):
    """Hold a step in flight; `queued`: behind another one."""

    predicted_ms: float | None
    width: int
    queued: bool


class StepClock:
    """Follow the ratio of observed to predicted times.

    scale  that ratio, an exponential mean over steps of all widths, for `/metrics`
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._in_flight: deque[_Scheduled] = deque()
        self._last: float | None = None

    def scheduled(self, predicted_ms: float | None, width: int) -> None:
        """Note a step that was scheduled; None: it is not compared, since it has a prompt."""
        self._in_flight.append(_Scheduled(predicted_ms, width, bool(self._in_flight)))

    def finished(self) -> tuple[int, float] | None:
        """Return width and ratio of the step that was scheduled first, if another came before."""
        now, before = time.perf_counter(), self._last
        self._last = now
        step = self._in_flight.popleft() if self._in_flight else _Scheduled(None, 0, False)
        if step.predicted_ms is None or not step.queued or before is None:
            return None
        ratio = 1000 * (now - before) / step.predicted_ms
        self.scale += SMOOTHING * (min(max(ratio, LEAST), MOST) - self.scale)
        return step.width, ratio
