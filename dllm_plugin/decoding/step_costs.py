"""Estimate the time of a step of floating canvases, by a model or from measurements."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

# By Dream-7B's shapes on an H200, FlashAttention 3 (benchmarks/reports/adaptive.md).
# How often run and window, two sequences, read their context: the second finds some of it cached.
READS = 1.4
# The part of a small step's time in which it reads weights: turns bytes into time.
KEY_SHARE = 0.75
# Of a mixture's; by LLaDA2-mini's shapes on an H100 (adaptive_h100.md).
MIXTURE_SHARE = 0.55
FADE = 1 - 1 / 256  # of the weight of a ratio, with each step that is observed
LEAST_WEIGHT = 0.9  # below it a width counts as not tried
DOUBT = 4  # how many steps a first ratio is weighed against
OUTLIER = 1.5  # times the mean, or its share: what one step may count as


def reads_of(kv_cache_layout: str) -> float:
    """Return how often run and window read their context together."""
    return 1.0 if kv_cache_layout == "distinct" else READS


class StepCosts(Protocol):
    """Return the time of a step, in any unit."""

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
    per_expert    of a further expert that is read, in every layer of a mixture
    experts       of a layer; `chosen` of them by each position
    """

    base: float = 1.0
    free: int = 128
    per_position: float = 1 / 213
    per_key: float = 0.0
    reads: float = 1.0
    per_expert: float = 0.0
    experts: int = 0
    chosen: int = 0

    def step(self, requests: int, width: int, context: int) -> float:
        """Return the time of a step; `context` is that of all requests together."""
        positions = self.per_position * max(0, requests * width - self.free)
        reads = self.reads if width > 1 else 1.0
        read = positions + self.per_key * context * reads
        if not self.experts:
            return self.base + read
        # How many experts as many positions choose, if each position chooses at random.
        others = (1 - self.chosen / self.experts) ** (requests * width)
        further = self.experts * (1 - others) - self.chosen
        return self.base + read + self.per_expert * further


class WeightBytes(NamedTuple):
    """Count the bytes of weights that a step reads.

    small    what a step of one position reads
    expert   one expert, in all layers of a mixture; 0 if there are none
    experts  of a layer; `chosen` of them by each position
    """

    small: float
    expert: float = 0.0
    experts: int = 0
    chosen: int = 0


def costs_of(
    weights: WeightBytes, key_bytes: float, reads: float, base: float = 1.0
) -> Costs:
    """Return the model's costs for a checkpoint; `base` is the time of a small step."""
    share = MIXTURE_SHARE if weights.experts else KEY_SHARE
    per_byte = base * share / weights.small
    return Costs(
        base=base,
        per_position=base * Costs().per_position * share / KEY_SHARE,
        per_key=per_byte * key_bytes,
        reads=reads,
        per_expert=per_byte * weights.expert,
        experts=weights.experts,
        chosen=weights.chosen,
    )


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


class _Mean(NamedTuple):
    """Store a mean ratio, its weight in steps, and the step of its last observation."""

    ratio: float
    weight: float
    step: int


class ObservedRatios:
    """Correct the costs of steps by their times: the ratio of both, at each width and load.

    A step may take longer than its graph: a host that is busy with many requests makes
    narrow steps cost as much as wider steps. Loads are numbers of requests to a power of two.
    """

    def __init__(self, plain_apart: bool = False) -> None:
        """Begin without history; `plain_apart`: the first width says what others do not show."""
        self.plain_apart = plain_apart
        self._step = 0
        # Of a load, by the place of a width.
        self._means: dict[int, dict[int, _Mean]] = {}

    def observe(self, requests: int, place: int, ratio: float) -> None:
        """Take the ratio of one step, as far as it is near those before."""
        self._step += 1
        means = self._means.setdefault(requests.bit_length(), {})
        weight = self._weight(means[place]) if place in means else 0.0
        if weight >= LEAST_WEIGHT:
            mean = means[place].ratio
        else:
            weight, [mean] = 0.0, self.of(requests, [place])
        near = min(max(ratio, mean / OUTLIER), mean * OUTLIER)
        mean += (near - mean) / (weight + DOUBT)
        means[place] = _Mean(mean, weight + 1, self._step)

    def of(self, requests: int, places: Sequence[int]) -> list[float]:
        """Return the ratios of widths; one not tried lately has that of the nearest."""
        means = self._means.get(requests.bit_length(), {})
        tried = [place for place in means if self._weight(means[place]) >= LEAST_WEIGHT]
        found = []
        for place in places:
            alike = tried
            if self.plain_apart and place == 0:
                # Drafts cost more beside their graph; so plain steps are tried if they may pay.
                alike = [0] if 0 in tried else []
            nearest = min(alike, key=lambda t: abs(t - place), default=None)
            found.append(1.0 if nearest is None else means[nearest].ratio)
        return found

    def _weight(self, mean: _Mean) -> float:
        return float(mean.weight * FADE ** (self._step - mean.step))
