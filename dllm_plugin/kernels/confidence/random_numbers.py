"""Compute random numbers from counters (SplitMix64), in plain torch.

Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

import torch
from torch import Tensor

_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed 64-bit number
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15


def sampled_order(score_T: Tensor, temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
    """Return scores whose k largest are a sample without replacement from ``softmax(score / T)``.

    This is the Gumbel-top-k trick; rows with temperature 0 keep their score. All tensors are
    float32, `uniform_T` in (0, 1).
    """
    sampled_T = (
        score_T / temperature_T.where(temperature_T > 0, 1.0) - (-uniform_T.log()).log()
    )
    return torch.where(temperature_T > 0, sampled_T, score_T)


def counter_uniform(seed: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """Return uniform float32 in (0, 1) that depend only on (seed, position, step).

    Three rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014) over int64, so a request
    gets the same numbers in every batch. Arguments broadcast; all int64.
    """
    state = _mix64(seed + _GOLDEN)
    state = _mix64(state ^ (position * _GOLDEN))
    state = _mix64(state ^ (step * _MIX_1))
    # 23 bits and a half are exact in float32, so 1.0 is never reached.
    bits = _shift(state, 41)
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def gumbel_uniform(
    seed_T: Tensor, position_T: Tensor, step_T: Tensor, width: int, first: int = 0
) -> Tensor:
    """Return uniform float64 ``[T, width]`` in (0, 1), one per row and token id.

    It is :func:`counter_uniform` with 52 bits and a fourth counter: the token id, from `first` on.
    """
    token_V = torch.arange(first, first + width, device=seed_T.device)
    state = _mix64(seed_T + _GOLDEN)
    state = _mix64(state ^ (position_T * _GOLDEN))
    state = _mix64(state ^ (step_T * _MIX_1))
    bits_TV = _shift(_mix64(state[:, None] ^ (token_V * _MIX_2)), 12)
    return (bits_TV.to(torch.float64) + 0.5) * 2.0**-52


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)
