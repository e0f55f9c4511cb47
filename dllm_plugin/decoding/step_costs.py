"""Say what a step of floating canvases costs: by a model, or as it was measured."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

# Both by Dream-7B's shapes on an H200, FlashAttention 3 (benchmarks/reports/adaptive.md).
# How often run and window, two sequences, read their context: the second finds some of it cached.
READS = 1.4
# What a key costs, by its share of the weights' bytes: a small step does more than read weights.
KEY_SHARE = 0.75
MEMORY, DOUBT = 64, 4  # steps that a ratio is a mean of: at most, and before the first of a width
OUTLIER = 1.5  # times a ratio that one step may count as


def reads_of(kv_cache_layout: str) -> float:
    """Return how often run and window read their context together."""
    return 1.0 if kv_cache_layout == "distinct" else READS


def key_cost(key_bytes: float, weight_bytes: float) -> float:
    """Return what reading a position of context costs, in units of a small step."""
    return KEY_SHARE * key_bytes / weight_bytes


class StepCosts(Protocol):
    """Know the time of a step, in any unit."""

    def step(self, requests: int, width: int, context: int) -> float:
        """Return the time of a step; `context` is that of all requests together."""
        ...


class Costs(NamedTuple):
    """Model the time of a step; by default in units of a small one.

    base          of a step of few positions
    free          positions up to which a step costs no more
    per_position  of each further one
    per_key       of a position of context, each time that it is read
    reads         how often run and window read their context together
    """

    base: float = 1.0
    free: int = 128
    per_position: float = 1 / 213
    per_key: float = 0.0
    reads: float = 1.0

    def step(self, requests: int, width: int, context: int) -> float:
        """Return the time of a step; `context` is that of all requests together."""
        positions = self.per_position * max(0, requests * width - self.free)
        reads = self.reads if width > 1 else 1.0
        return self.base + positions + self.per_key * context * reads


class MeasuredCosts(NamedTuple):
    """Interpolate measured times, in ms.

    positions  computed in a captured step, ascending
    ms         what it takes at empty contexts
    per_key    of a position of context, each time that it is read
    reads      how often run and window read their context together
    graphs     ascending numbers of requests that are captured, of each width
    """

    positions: Sequence[int]
    ms: Sequence[float]
    per_key: float
    reads: float
    graphs: Mapping[int, Sequence[int]]

    def step(self, requests: int, width: int, context: int) -> float:
        """Return the time of a step, padded as its graph is."""
        counts = self.graphs.get(width, ())
        place = bisect_left(counts, requests)
        padded = width * (counts[place] if place < len(counts) else requests)
        reads = self.reads if width > 1 else 1.0
        return self._empty(padded) + self.per_key * context * reads

    def _empty(self, positions: int) -> float:
        place = bisect_left(self.positions, positions)
        if place == 0:
            return self.ms[0]
        if place == len(self.positions):
            # Beyond what is captured as the second half of it goes on.
            low, high = bisect_left(self.positions, self.positions[-1] / 2), place - 1
        else:
            low, high = place - 1, place
        before, after = self.positions[low], self.positions[high]
        slope = (self.ms[high] - self.ms[low]) / max(after - before, 1)
        return self.ms[high] + (positions - after) * slope


class ObservedRatios:
    """Correct the costs of steps by their times: the ratio of both, at each width.

    A step may take longer than its graph: a host that is busy with many requests, say, makes
    narrow steps cost as much as wider ones.
    """

    def __init__(self, widths: int) -> None:
        self._ratio_W = np.ones(widths)
        self._seen = [0] * widths

    def observe(self, place: int, ratio: float) -> None:
        """Take the ratio of one step, as far as it is near those before."""
        seen = self._seen[place]
        mean = self._ratio_W[place] if seen else self.all()[place]
        near = min(max(ratio, mean / OUTLIER), mean * OUTLIER)
        self._ratio_W[place] = mean + (near - mean) / (seen + DOUBT)
        self._seen[place] = min(seen + 1, MEMORY - DOUBT)

    def all(self) -> np.ndarray:
        """Return the ratio of every width; one that was not tried has that of the nearest."""
        tried = np.flatnonzero(self._seen)
        if not len(tried):
            return self._ratio_W
        every = np.arange(len(self._ratio_W))
        nearest = np.abs(every[:, None] - tried).argmin(axis=1)
        ratio_W: np.ndarray = self._ratio_W[tried[nearest]]
        return ratio_W
