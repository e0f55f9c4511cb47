"""Estimate the log-likelihood of a text: which positions to mask, and what the answers add up to.

A model of this kind predicts masked tokens from all others, so a text has no chain of conditional
probabilities to read off one forward. No HTTP and no engine here. Shape letters: S samples,
L tokens of the text.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch


class Sample(NamedTuple):
    """Hold one forward of an estimate.

    masked   positions that are masks, ascending
    counted  how many of them count, from the first on
    weight   factor of the sum of their log-probabilities
    """

    masked: tuple[int, ...]
    counted: int
    weight: float


class Estimate(NamedTuple):
    """Hold a log-likelihood; the error is None where no chance is involved."""

    logprob: float
    standard_error: float | None


def mask_counts(length: int, samples: int, first: int) -> list[int]:
    """Return how many of `length` tokens each sample masks: LLaDA's even spread over 1..length.

    Args:
        first: masks of the first sample; the others follow at equal distances, round and round.
    """
    last = first + (samples - 1) * (length / samples)
    # In float32, which decides how LLaDA's own estimate rounds halves.
    spread_S = torch.linspace(float(first), last, steps=samples).round().long()
    return [(count - 1) % length + 1 for count in spread_S.tolist()]


def monte_carlo(length: int, samples: int, seed: int) -> list[Sample]:
    """Mask a spread of counts, each at positions that the seed and the sample's number choose."""
    if length == 1:
        return [Sample((0,), 1, 1.0)]
    first = int(np.random.default_rng(seed).integers(1, length + 1))
    drawn = []
    for number, count in enumerate(mask_counts(length, samples, first)):
        order_L = np.random.default_rng((seed, number)).permutation(length)
        drawn.append(Sample(tuple(sorted(order_L[:count].tolist())), count, length / count))
    return drawn


def pseudo(length: int, samples: int, seed: int) -> list[Sample]:
    """Mask each token alone: the pseudo-log-likelihood."""
    return [Sample((place,), 1, 1.0) for place in range(length)]


def left_to_right(length: int, samples: int, seed: int) -> list[Sample]:
    """Mask each token and all behind it: the chain rule in the order of the text."""
    return [Sample(tuple(range(place, length)), 1, 1.0) for place in range(length)]


METHODS: dict[str, Callable[[int, int, int], list[Sample]]] = {
    "monte_carlo": monte_carlo,
    "pseudo": pseudo,
    "left_to_right": left_to_right,
}


def estimate(
    method: str, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]
) -> Estimate:
    """Return the estimate of one text.

    Args:
        logprobs: of each sample's masked tokens, in their order.
    """
    pairs = zip(samples, logprobs, strict=True)
    values = [one.weight * math.fsum(scored[: one.counted]) for one, scored in pairs]
    if method != "monte_carlo":
        return Estimate(math.fsum(values), None)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(math.fsum(values) / len(values), error)
