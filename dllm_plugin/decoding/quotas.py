"""Compute the numbers of authors' schedules as they do, to the last bit. Torch only.

Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

import torch
from torch import Tensor

# A float32 share of at least 1 / 4096 is a whole number of these parts of 1.
UNITS = 2**36


def dream_time(index_R: Tensor, steps_R: Tensor, eps_R: Tensor) -> Tensor:
    """Return ``torch.linspace(1, eps, steps + 1)[index]`` in float32, rounded as torch does."""
    stride_R = (eps_R - 1.0) / steps_R
    # torch fills the second half from the end; time schedules see the difference.
    from_start_R, from_end_R = (
        1.0 + stride_R * index_R,
        eps_R - stride_R * (steps_R - index_R),
    )
    return torch.where(index_R < (steps_R + 1) // 2, from_start_R, from_end_R)


def step_with_quota(step_R: Tensor, left_R: Tensor, steps_R: Tensor) -> Tensor:
    """Return the first step from `step_R` on in which A2D's quota is not 0."""
    # With this many steps left the share is one half, which rounds to 0 unless float32 lifts it.
    half_R = (steps_R - 2 * left_R).clamp_min(0)
    first_R = half_R + (rounded_quota(half_R, left_R, steps_R) == 0)
    first_R = first_R * (left_R > 0)  # a step that decides nothing is none
    return torch.minimum(torch.maximum(step_R, first_R), steps_R - 1)


def rounded_quota(step_R: Tensor, left_R: Tensor, steps_R: Tensor) -> Tensor:
    """Return ``round(left * (1 - s / t))``: s and t in float32, halves to even."""
    after_R = steps_R - step_R - 1
    before_R = steps_R - step_R
    times = [(time_R.double() / steps_R).float() for time_R in (after_R, before_R)]
    # As the reference goes from time to mask rate and back; it decides halves.
    s_R, t_R = (1.0 - (1.0 - time_R) for time_R in times)
    # A quotient in float64, rounded, equals the quotient in float32; GPUs approximate the latter.
    kept_R = (s_R.double() / t_R.double()).float()
    # In whole units: torch 2.11 compiles float64 to float32 to float64 without the rounding.
    units_R = left_R * (UNITS - (kept_R * UNITS).long())
    return torch.round(units_R.double() / UNITS).to(torch.int64)
