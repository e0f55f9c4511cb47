"""Choose how many positions of every canvas a step computes, by load, and widths to capture.

Numpy only. A graph for every width and number of requests would take too much memory, and most of
them would never be replayed.

No clock is read and no random number drawn: equal histories choose equal widths. A step's time is
part of the history where its costs were measured.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations

import numpy as np

from .acceptance import PRIOR, Acceptance, DraftAcceptance, Drafted
from .step_costs import Costs, ObservedRatios, StepCosts

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
EVERY = 8  # steps between two choices
LOAD_CHANGE = 1 / 8  # of the running requests, which brings a choice about at once
MARGIN = 1.03  # what another width has to promise
CYCLE, TRIALS = 64, 6  # of so many steps, how many try the width beside the chosen one
DRAFTS_CYCLE = 256  # a trial of drafts that are refused costs a step its token
TRIAL_COST = 0.003  # of the tokens of plain steps, what trials of drafts may cost
FEWEST, MOST = 5, 16  # steps of such a trial
GOOD_ENOUGH = 0.9  # `balanced`: the widest with this share of the best rate
MOST_WIDTHS = 6  # for each number of requests
WORTH = 0.8  # of the best rate, at some acceptance and context
CONTEXTS = (0, 1, 4)  # what reading all contexts twice costs, in units of a small step
SETTLES = 2  # what a step commits, the one before has decided


def widths_between(fewest: int, most: int) -> tuple[int, ...]:
    """Return the widths to choose from, both ends included."""
    return tuple(sorted({fewest, most} | {w for w in WIDTHS if fewest <= w <= most}))


def doubled(longest: int) -> tuple[int, ...]:
    """Return the lengths of drafts: powers of two, and the longest."""
    powers = [1 << power for power in range(longest.bit_length())]
    return tuple(sorted({*powers, longest}))


def choose(
    rates: np.ndarray, current: int | None, balanced: bool, margin: float = MARGIN
) -> int:
    """Choose an index into rates of ascending widths; the current one unless another is better."""
    # Of widths that promise the same, the widest: each of its decisions sees most.
    best = len(rates) - 1 - int(rates[::-1].argmax())
    if not balanced:
        stays = current is not None and rates[best] <= margin * rates[current]
        return current if current is not None and stays else best
    widest = _widest(rates, GOOD_ENOUGH)
    if current is None:
        return widest
    if widest < current and rates[current] * margin >= GOOD_ENOUGH * rates[best]:
        return current
    if widest > current:
        return max(current, _widest(rates, GOOD_ENOUGH * margin))
    return widest


def _widest(rates: np.ndarray, share: float) -> int:
    return int(np.flatnonzero(rates >= share * rates.max())[-1])


class WidthController:
    """Choose the width of each step, and learn from what steps committed.

    changes  how often another width was chosen
    fitted   p0 and lambda that fit best when the width was chosen
    """

    def __init__(
        self,
        widths: Sequence[int],
        shift: bool,
        costs: StepCosts,
        balanced: bool = False,
        allowed: Mapping[int, Sequence[bool]] | None = None,
        drafted: Drafted | None = None,
    ) -> None:
        """Begin without history.

        Args:
            drafted: tokens per forward of verified drafts, by rows and acceptance.
            allowed: which widths may be chosen for at most so many requests, ascending; all for
                more, and by default.
        """
        self.widths = tuple(widths)
        self._most = sorted(allowed or {})
        every = np.ones(len(self.widths), dtype=bool)
        self._allowed = [np.array((allowed or {})[most]) for most in self._most] + [
            every
        ]
        self.costs = costs
        self.ratios = ObservedRatios(plain_apart=drafted is not None)
        self.balanced = balanced
        self.acceptance: Acceptance | DraftAcceptance = Acceptance(widths, shift)
        self._cycle, self._drafts = CYCLE, drafted is not None
        self._trials, self._tried = TRIALS, 0
        if drafted is not None:
            self.acceptance = DraftAcceptance(widths, drafted)
            self._cycle = DRAFTS_CYCLE
        self.current: int | None = None
        self.changes = 0
        self.fitted = PRIOR
        self._steps = 0
        self._requests = 0
        # Width of the steps whose results came last, and how many.
        self._observed = (0, 0)

    def rates(self, requests: int, context: int) -> np.ndarray:
        """Return the tokens per time that each width promises."""
        self.fitted, tokens = self.acceptance.expected()
        places = np.flatnonzero(self.may(requests)).tolist()
        rates = np.zeros(len(self.widths))
        for place, ratio in zip(places, self.ratios.of(requests, places), strict=True):
            cost = self.costs.step(requests, self.widths[place], context)
            rates[place] = requests * tokens[place] / (cost * ratio)
        if self._drafts:
            # Near the break-even plain steps are chosen: their tokens are certain.
            rates[0] *= MARGIN
        return rates

    def may(self, requests: int) -> np.ndarray:
        """Return which widths may be chosen for a number of requests."""
        return self._allowed[bisect_left(self._most, requests)]

    def width(self, requests: int, context: int) -> int:
        """Return the width of the next step."""
        moved = abs(requests - self._requests) > LOAD_CHANGE * self._requests
        settled = self._cycle - self._trials
        place = self._steps % self._cycle
        self._steps += 1
        if self.current is None or moved or (place % EVERY == 0 and place < settled):
            rates = self.rates(requests, context)
            chosen = choose(rates, self.current, self.balanced)
            self.changes += self.current is not None and chosen != self.current
            self.current, self._requests = chosen, requests
            if self._drafts:
                self._plan_trial(rates)
        if place < settled or (requests == 1 and not self._drafts):
            return self.widths[self.current]
        if self._drafts and self.current == 0:
            return self.widths[self._tried]
        may = np.flatnonzero(self.may(requests))
        beside = bisect_left(may, self.current) + (
            1 if (self._steps - 1) // self._cycle % 2 == 0 else -1
        )
        return self.widths[int(may[min(max(beside, 0), len(may) - 1)])]

    def _plan_trial(self, rates: np.ndarray) -> None:
        """Choose which drafts plain steps try, and how long: as long as it costs little."""
        self._trials, self._tried = TRIALS, 0
        if self.current == 0 and rates[1:].any():
            self._tried = 1 + int(rates[1:].argmax())
            lost = 1 - MARGIN * rates[self._tried] / rates[0]
            steps = TRIAL_COST * self._cycle / max(lost, TRIAL_COST)
            self._trials = int(min(max(steps, FEWEST), MOST))

    def observe(self, width: int, requests: int, tokens: int) -> None:
        """Update acceptance by the result of a step of one width, in order."""
        last, count = self._observed
        count = count + 1 if width == last else 1
        self._observed = (width, count)
        if count > SETTLES and requests > 0:
            self.acceptance.observe(width, requests, tokens)

    def observe_time(self, requests: int, width: int, ratio: float) -> None:
        """Update the cost of a step by the time it took."""
        if width in self.acceptance.places:
            self.ratios.observe(requests, self.acceptance.places[width], ratio)


@cache
def widths_worth(
    requests: int, widths: tuple[int, ...], shift: bool
) -> tuple[int, ...]:
    """Return the widths, ascending, that a number of requests may want.

    Of those that come near the best one at some acceptance and some context, as few as lose nothing
    that a controller would change its width for, else the six that lose least where they lose
    most.
    """
    curves_PW = _curves(widths, shift)
    costs = Costs(per_key=1.0)
    shares = []
    for context in CONTEXTS:
        times_W = [costs.step(requests, width, context) for width in widths]
        rates_PW = curves_PW / np.array(times_W)
        shares.append(rates_PW / rates_PW.max(axis=1, keepdims=True))
    share_LW = np.concatenate(shares)
    worth = np.flatnonzero(share_LW.max(axis=0) >= WORTH).tolist()
    chosen = np.array([], dtype=np.int64)
    for count in range(1, min(MOST_WIDTHS, len(worth)) + 1):
        some = np.array(list(combinations(worth, count)))
        least = share_LW[:, some].max(axis=2).min(axis=0)
        chosen = some[least.argmax()]
        if least.max() * MARGIN >= 1:
            break
    return tuple(widths[i] for i in chosen.tolist())


@cache
def _curves(widths: tuple[int, ...], shift: bool) -> np.ndarray:
    return Acceptance(widths, shift).curves


def allowed(
    graphs: Mapping[int, Sequence[int]], widths: Sequence[int], most: int
) -> dict[int, tuple[bool, ...]]:
    """Return which widths a controller may choose, by ascending numbers of requests.

    Those with a graph, and those that compute more than `most` positions: such steps take the
    device longer than the host, whatever they run in. For more requests than all of these every
    width may be chosen.

    Args:
        graphs: ascending numbers of requests that are captured, of each width.
    """
    counts = sorted({count for counts in graphs.values() for count in counts})
    return {
        count: tuple(w * count > most or count in graphs.get(w, ()) for w in widths)
        for count in counts
    }
