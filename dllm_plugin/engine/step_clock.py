"""Compare how long steps take with how long their costs say."""

import time
from collections import deque

SMOOTHING = 1 / 64  # of steps
LEAST, MOST = 0.5, 2.0


class StepClock:
    """Follow the ratio of observed to predicted times.

    scale  that ratio, an exponential mean. It is the same for all widths, so none is chosen by it.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._in_flight: deque[tuple[float | None, bool]] = deque()
        self._last: float | None = None

    def scheduled(self, predicted_ms: float | None) -> None:
        """Note a step that was scheduled; None: it is not compared, since it has a prompt."""
        self._in_flight.append((predicted_ms, bool(self._in_flight)))

    def finished(self) -> None:
        """Take the time of the step that was scheduled first, if it was queued behind another."""
        now, before = time.perf_counter(), self._last
        self._last = now
        predicted, queued = self._in_flight.popleft() if self._in_flight else (None, False)
        if predicted is None or not queued or before is None:
            return
        ratio = 1000 * (now - before) / predicted
        self.scale += SMOOTHING * (min(max(ratio, LEAST), MOST) - self.scale)
