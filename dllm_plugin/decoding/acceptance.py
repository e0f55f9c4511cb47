"""Estimate how many tokens a forward commits at each width, from what past forwards committed.

In a forward m masks accept ``S(m) = p0 (1 - exp(-m / lam)) / (1 - exp(-1 / lam))`` tokens: p0 is
the share of first masks that are accepted, lam is how fast it falls with their rank.

If a causal forward verifies drafts, it accepts each draft with one probability, their share.
Numpy only.
"""

from collections.abc import Callable, Sequence

import numpy as np

P0 = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
LAMBDA = (0.7, 1.5, 2.5, 4.0, 7.0, 12.0)
# Narrow windows teach nothing about wide windows, so the first guess is optimistic.
PRIOR, PRIOR_STEPS = (0.9, 4.0), 60.0
MOST_STEPS = 20_000.0  # what came before them is forgotten
FIT_STEPS = 1000.0  # what the fit counts for at a width, beside steps of that width
SHARES = np.linspace(0.0, 0.99, 100)
FIRST_SHARE = 0.85  # a guess
FIRST_STEPS = 4.0  # how many steps the guess counts for
FADE = 1 - 1 / 64  # of what earlier steps have shown, with each step that drafts
PLAIN_FADE = 1 - 1 / 2048  # with each step that does not


def accepted(masks: float, p0: float, lam: float) -> float:
    """Return how many of the given masks a forward accepts."""
    return float(p0 * -np.expm1(-max(masks, 0.0) / lam) / -np.expm1(-1 / lam))


def tokens_per_forward(width: int, p0: float, lam: float, shift: bool) -> float:
    """Return what a request commits per forward, with run and window as steps go on.

    A token is computed once as a mask and once decided, so windows are narrower by what commits.
    """
    if width == 1 and not shift:
        return 0.5
    low, high = 1.0, float(width)
    for _ in range(40):
        middle = (low + high) / 2
        if accepted(width - middle + shift, p0, lam) > middle:
            low = middle
        else:
            high = middle
    return low


class Acceptance:
    """Fit (p0, lam) to counts of forwards and committed tokens at each width."""

    def __init__(self, widths: Sequence[int], shift: bool) -> None:
        self.pairs = [(p0, lam) for p0 in P0 for lam in LAMBDA]
        curves = [
            [tokens_per_forward(w, *pair, shift) for w in widths] for pair in self.pairs
        ]
        self.curves = np.array(curves)
        self.places = {width: i for i, width in enumerate(widths)}
        self.steps = np.full(len(widths), PRIOR_STEPS / len(widths))
        self.tokens = self.steps * self.curves[self.pairs.index(PRIOR)]
        self._total = PRIOR_STEPS

    def observe(self, width: int, steps: int, tokens: int) -> None:
        """Count what forwards of requests committed."""
        place = self.places[width]
        self.steps[place] += steps
        self.tokens[place] += tokens
        self._total += steps
        if self._total > MOST_STEPS:
            self.steps *= MOST_STEPS / self._total
            self.tokens *= MOST_STEPS / self._total
            self._total = MOST_STEPS

    def expected(self) -> tuple[tuple[float, float], np.ndarray]:
        """Return the fitted pair, and the tokens per forward of each width.

        These follow the fit if a width was hardly tried, and what it committed otherwise.
        """
        error = (self.curves - self.tokens / self.steps) ** 2
        best = int((error * self.steps).sum(axis=1).argmin())
        tokens = self.curves[best] * FIT_STEPS + self.tokens
        return self.pairs[best], tokens / (FIT_STEPS + self.steps)


def _kept(drafts: int, share: float) -> float:
    """Return how many tokens a causal forward keeps: the accepted drafts, and one more."""
    return float(sum(share**draft for draft in range(drafts + 1)))


def tokens_of_round(rows: int, share: float) -> float:
    """Return tokens per forward of rounds that draft in one forward and verify in another."""
    return _kept(rows - 1, share) / 2 if rows > 1 else 1.0


def tokens_of_stride(rows: int, share: float) -> float:
    """Return tokens per forward of strides of ``2 N - 1`` rows.

    After a refused draft a forward verifies nothing and brings one token.
    """
    drafts = (rows - 1) // 2
    all_accepted = share**drafts
    return (_kept(drafts, share) + 1 - all_accepted) / (2 - all_accepted)


Drafted = Callable[[int, float], float]


class DraftAcceptance:
    """Estimate which share of drafts is accepted from the tokens of each length.

    Steps count alike for any number of requests: else a step of a few requests would change
    nothing for minutes after steps of many.
    """

    def __init__(self, widths: Sequence[int], drafted: Drafted) -> None:
        """Begin with a guess; `drafted`: tokens per forward by rows and share."""
        self.widths, self.drafted = widths, drafted
        self.places = {width: i for i, width in enumerate(widths)}
        self.curves = np.array([[drafted(w, s) for s in SHARES] for w in widths])
        self.steps = np.zeros(len(widths))
        # As if steps of the longest drafts had shown it.
        self.steps[-1] = FIRST_STEPS
        self.tokens = self.steps * drafted(widths[-1], FIRST_SHARE)

    def observe(self, width: int, steps: int, tokens: int) -> None:
        """Count what a step brought: `steps` forwards of requests."""
        fade = FADE if width > 1 else PLAIN_FADE
        self.steps *= fade
        self.tokens *= fade
        self.steps[self.places[width]] += 1
        self.tokens[self.places[width]] += tokens / steps

    def share(self) -> float:
        """Return the share, by as many drafts as each length has shown."""
        weight = weighted = 0.0
        for place in np.flatnonzero(self.steps):
            if self.widths[place] > 1:
                brings = self.tokens[place] / self.steps[place]
                share = np.interp(brings, self.curves[place], SHARES)
                weight += self.tokens[place]
                weighted += self.tokens[place] * share
        return float(weighted / weight) if weight else 0.0

    def expected(self) -> tuple[tuple[float, float], np.ndarray]:
        """Return the share, with a zero, and the tokens per forward of each length."""
        share = self.share()
        tokens = [self.drafted(width, share) for width in self.widths]
        return (share, 0.0), np.array(tokens)
