"""Choose denoising steps per block so that requests average a given number of tokens per forward.

A request has one number of steps for all its blocks, so an average that is no whole number of steps
needs several requests. Forwards that only commit do not count. Light imports only.
"""

from collections.abc import Sequence
from typing import Any

EDITING = "joint_threshold"
TOLERANCE = 0.02  # relative error of the tokens per forward
# Rounding changes the total by at most half a step, and a request has at least one step. With so
# many requests the error is within TOLERANCE for any rate.
MOST_REQUESTS = 25


def steps_of(count: int, block: int, rate: float) -> list[int]:
    """Return steps per block of `count` requests, spread evenly around `block / rate`."""
    total = round(count * block / rate)
    return [(i + 1) * total // count - i * total // count for i in range(count)]


def arguments(policy: str, steps: int) -> dict[str, Any]:
    """Return request arguments under which a policy takes so many steps for each block."""
    asked: dict[str, Any] = {"dllm_policy": policy, "dllm_steps": steps}
    if policy == EDITING:  # would edit random tokens for ever
        asked |= {"dllm_editing_threshold": 1.0, "dllm_max_post_steps": 0}
    return asked


def average(count: int, block: int, rate: float) -> float:
    """Return the tokens per forward of these schedules over whole blocks."""
    return count * block / sum(steps_of(count, block, rate))


def check(
    rate: float, output_len: int, rounds: int, grid: Sequence[tuple[int, Sequence[int]]]
) -> None:
    """Raise ValueError with one sentence unless every grid point can reach the rate.

    Args:
        grid: block lengths, each with the numbers of requests that are answered at once.
    """

    def is_met(rounds: int, at_once: int, block: int) -> bool:
        return abs(average(rounds * at_once, block, rate) / rate - 1) <= TOLERANCE

    points = [(block, at_once) for block, numbers in grid for at_once in numbers]
    for block, at_once in points:
        if output_len % block:
            raise ValueError(
                f"--tokens-per-forward {rate:g} is fixed over whole blocks, and --output-len "
                f"{output_len} is no whole number of blocks of {block}: use "
                f"{-(-output_len // block) * block}."
            )
        if not is_met(rounds, at_once, block):
            least = next(
                n
                for n in range(1, MOST_REQUESTS + 1)
                if all(is_met(n, m, b) for b, m in points)
            )
            raise ValueError(
                f"--tokens-per-forward {rate:g} with --rounds {rounds} would be "
                f"{average(rounds * at_once, block, rate):.2f} for {at_once} at once, in whole "
                f"steps per block of {block}: use --rounds {least}."
            )
