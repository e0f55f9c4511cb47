"""Show on /metrics which widths steps of floating canvases have, and by what they are chosen."""

from functools import cache
from typing import NamedTuple

from prometheus_client import Counter, Gauge, Histogram

from dllm_plugin.decoding.widths import WIDTHS

# In the place of a request's forwards: what the next two integers are.
WIDTH, FITTED, SCALE = -1, -2, -3
MILLI = 1000


class WidthMetrics(NamedTuple):
    """Hold the metrics, labelled as all vLLM metrics are."""

    width: Histogram
    changes: Counter
    p0: Gauge
    lam: Gauge
    scale: Gauge

    def observe(self, numbers: list[int], labels: list[object]) -> None:
        """Take what :func:`told` made of a step."""
        for i in range(0, len(numbers), 3):
            kind, first, second = numbers[i : i + 3]
            if kind == WIDTH:
                self.width.labels(*labels).observe(first)
                self.changes.labels(*labels).inc(second)
            elif kind == FITTED:
                self.p0.labels(*labels).set(first / MILLI)
                self.lam.labels(*labels).set(second / MILLI)
            elif kind == SCALE:
                self.scale.labels(*labels).set(first / MILLI)


def told(
    width: int, changes: int, fitted: tuple[float, float], scale: float | None = None
) -> list[int]:
    """Return what is told of a step, as integers.

    Its width, how often that has changed, the fitted acceptance and, where steps were measured, how
    their times compare with that.
    """
    p0, lam = fitted
    numbers = [WIDTH, width, changes, FITTED, round(MILLI * p0), round(MILLI * lam)]
    return numbers if scale is None else [*numbers, SCALE, round(MILLI * scale), 0]


@cache
def width_metrics(names: tuple[str, ...]) -> WidthMetrics:
    """Register the metrics, once in a process; `names` are those of the labels."""
    widths = [float(width) for width in WIDTHS]
    return WidthMetrics(
        Histogram("diffuplug:width", "Canvas positions of a step.", names, buckets=widths),
        Counter("diffuplug:width_changes", "How often another width was chosen.", names),
        _gauge("acceptance_p0", "Share of first masks that are accepted, as fitted.", names),
        _gauge("acceptance_lambda", "How fast that falls with the rank of a mask.", names),
        _gauge("step_cost_scale", "Time of steps by what was measured at capture.", names),
    )


def _gauge(name: str, documentation: str, names: tuple[str, ...]) -> Gauge:
    return Gauge(f"diffuplug:{name}", documentation, names, multiprocess_mode="mostrecent")
