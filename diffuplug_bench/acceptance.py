"""Accept masks by drawn numbers: dummy weights have no confidence that means anything."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dllm_plugin.decoding.plan import Canvas, Proposal, StepPlan
    from dllm_plugin.decoding.policies import PolicySettings, Rule


def drawn(p0: float, lam: float, seed: int, device: torch.device) -> "Rule":
    """Return a rule that accepts the k-th mask with probability ``p0 exp(-k / lam)``.

    As :mod:`dllm_plugin.decoding.acceptance` describes it; where none is, the first one is taken.
    """
    calls = torch.full((), seed, dtype=torch.int64, device=device)

    def rule(
        plan: "StepPlan",
        canvas: "Canvas",
        proposal: "Proposal",
        settings: "PolicySettings",
    ) -> Tensor:
        candidates_RC = plan.candidates_RC
        rank_RC = candidates_RC.cumsum(dim=1) - 1
        take_RC = candidates_RC & (
            _uniform(calls, rank_RC) < p0 * torch.exp(-rank_RC / lam)
        )
        calls.add_(1)
        stuck_R1 = ~take_RC.any(dim=1, keepdim=True)
        return take_RC | (candidates_RC & (rank_RC == 0) & stuck_R1)

    return rule


def _uniform(calls: Tensor, like_RC: Tensor) -> Tensor:
    """Return a number in [0, 1) for every place: a hash, which compiled steps hold as well."""
    place = torch.arange(like_RC.numel(), device=like_RC.device).view_as(like_RC)
    mixed = calls * 1_000_003 + place
    for factor in (0x45D9F3B, 0x119DE1F3):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)).to(torch.float32) / 2**32
