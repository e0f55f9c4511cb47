"""Draw the random numbers of a position and count the positions of a step, one at a time."""

from collections.abc import Collection

import torch
from torch import Tensor

WIDE = 2**64 - 1
# Streams of the plugin's random numbers; part of its seeded results.
RANDOM_ORDER, ORIGIN_ORDER, ALG_TEMP_ORDER = 0x5D2F, 0x0B16, 0xA16


def counter_uniform(seed: int, position: int, step: int) -> float:
    """Return a uniform number in (0, 1) of (seed, position, step), in Python integers."""
    golden, first = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
    state = _mix((seed + golden) & WIDE)
    state = _mix(state ^ (position * golden & WIDE))
    state = _mix(state ^ (step * first & WIDE))
    return ((state >> 40) + 0.5) * 2.0**-24


def counter_uniforms(seed: int, position: int, step: int, size: int) -> Tensor:
    """Return uniform numbers in (0, 1) of (seed, position, step) and each token, float64."""
    golden, first, last = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    state = _mix((seed + golden) & WIDE)
    state = _mix(state ^ (position * golden & WIDE))
    state = _mix(state ^ (step * first & WIDE))
    bits = [_mix(state ^ (token * last & WIDE)) >> 12 for token in range(size)]
    return (torch.tensor(bits, dtype=torch.float64) + 0.5) * 2.0**-52


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WIDE
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WIDE
    return x ^ (x >> 31)


def llada_quota(num_masked: int, steps: int, step: int) -> int:
    """Count as LLaDA ``get_num_transfer_tokens``: an even share, the remainder in first steps."""
    if step >= steps:
        return num_masked
    return num_masked // steps + (step < num_masked % steps)


def dream_quota(num_left: int, steps: int, step: int, eps: float) -> int:
    """Count as Dream ``_sample``: a share of what is left; the last step takes everything."""
    if step >= steps - 1:
        return num_left
    time = torch.linspace(1, eps, steps + 1)
    return int(num_left * (1 - time[step + 1] / time[step]))


def factor_count(confidences: list[float], factor: float) -> int:
    """Count as Fast-dLLM ``get_transfer_index_dynamic`` how many falling confidences are taken."""
    n = len(confidences)
    fails = (j for j in range(1, n) if confidences[j] < 1 - factor / (j + 2))
    count = next(fails, n - 1)
    return count + 1 if count in (0, n - 1) else count


def ranking(probs: Tensor, policy: str) -> Tensor:
    """Score each position; larger is more certain."""
    if policy == "entropy":
        return (probs * (probs + 1e-10).log()).sum(-1)
    if policy == "topk_margin":
        best = probs.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]
    return probs.amax(-1)


def float32(value: float) -> float:
    """Round a number as the engine's options are rounded."""
    return float(torch.tensor(value))


def final_answer(
    tokens: list[int], mask_id: int, stop: Collection[int], max_tokens: int
) -> list[int] | None:
    """Return the answer, once the leading run of decided tokens holds all of it; else None."""
    answer: list[int] = []
    for token in tokens:
        if token == mask_id:
            return None
        answer.append(token)
        if token in stop or len(answer) == max_tokens:
            return answer
    return None
