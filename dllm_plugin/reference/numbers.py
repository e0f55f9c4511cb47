"""Compute the random numbers of a position, and how many positions a step decides."""

import torch
from torch import Tensor

WIDE = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
LAST = 0x94D049BB133111EB
# Streams of the plugin's random numbers; part of its seeded results.
RANDOM_ORDER, ORIGIN_ORDER, ALG_TEMP_ORDER = 0x5D2F, 0x0B16, 0xA16


def counter_uniform(seed: int, position: int, step: int) -> float:
    """Return a uniform number in (0, 1) of (seed, position, step), in Python integers."""
    return ((_state(seed, position, step) >> 41) + 0.5) * 2.0**-23


def counter_uniforms(seed: int, position: int, step: int, size: int) -> Tensor:
    """Return uniform numbers in (0, 1) of (seed, position, step) and each token, float64."""
    state = _state(seed, position, step)
    bits = [_mix(state ^ (token * LAST & WIDE)) >> 12 for token in range(size)]
    return (torch.tensor(bits, dtype=torch.float64) + 0.5) * 2.0**-52


def _state(seed: int, position: int, step: int) -> int:
    state = _mix((seed + GOLDEN) & WIDE)
    state = _mix(state ^ (position * GOLDEN & WIDE))
    return _mix(state ^ (step * FIRST & WIDE))


def _mix(x: int) -> int:
    """Apply the SplitMix64 finaliser."""
    x = (x ^ (x >> 30)) * FIRST & WIDE
    x = (x ^ (x >> 27)) * LAST & WIDE
    return x ^ (x >> 31)


def llada_quota(num_masked: int, steps: int, step: int) -> int:
    """Count as LLaDA ``get_num_transfer_tokens``: an even share, the remainder first."""
    if step >= steps:
        return num_masked
    return num_masked // steps + (step < num_masked % steps)


def rounded_quota(num_left: int, steps: int, step: int) -> int:
    """Count A2D's share of what is left in a step, rounded; halves to even."""
    rates = []
    for time in ((steps - step - 1) / steps, (steps - step) / steps):
        rates.append(1 - (1 - torch.tensor(time)))
    share = 1 - (rates[0] / rates[1]).item()
    return round(num_left * share)


def step_with_rounded_quota(num_left: int, steps: int, step: int) -> int:
    """Return the first step from `step` on whose quota is not 0; A2D runs no other."""
    while step < steps - 1 and rounded_quota(num_left, steps, step) == 0:
        step += 1
    return step


def dream_quota(num_left: int, steps: int, step: int, eps: float) -> int:
    """Count as Dream ``_sample``: a share of what is left; the last step takes all."""
    if step >= steps - 1:
        return num_left
    return int(num_left * dream_share(steps, step, eps))


def rnd1_quota(num_left: int, size: int, steps: int, step: int) -> int:
    """Count as RND1 ``diffusion_sample``: all but a float32 share of the block, cut."""
    share = torch.tensor(max(steps - 1 - step, 0) / steps, dtype=torch.float32)
    return num_left - int(torch.tensor(float(size)) * share)


def dream_share(steps: int, step: int, eps: float) -> Tensor:
    """Return the share of the masked positions that a step of Dream decides, float32."""
    time = torch.linspace(1, eps, steps + 1)
    return 1 - time[step + 1] / time[step]


def factor_count(confidences: list[float], factor: float) -> int:
    """Count as Fast-dLLM ``get_transfer_index_dynamic``, for falling confidences."""
    last = len(confidences) - 1
    count = last
    for j in range(1, len(confidences)):
        if confidences[j] < factor_limit(j, factor):
            count = j
            break
    return count + 1 if count in (0, last) else count


def factor_limit(rank: int, factor: float) -> float:
    """Return the least confidence that the factor rule takes at a rank, from 0 on."""
    return 1 - factor / (rank + 2)


def float32(value: float) -> float:
    """Round a number as the engine's options are rounded."""
    return float(torch.tensor(value))
