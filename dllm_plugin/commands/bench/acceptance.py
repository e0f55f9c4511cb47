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
    numbers = torch.Generator(device).manual_seed(seed)

    def rule(
        plan: "StepPlan", canvas: "Canvas", proposal: "Proposal", settings: "PolicySettings"
    ) -> Tensor:
        candidates_RC = plan.candidates_RC
        rank_RC = candidates_RC.cumsum(dim=1) - 1
        number_RC = torch.rand(candidates_RC.shape, generator=numbers, device=device)
        take_RC = candidates_RC & (number_RC < p0 * torch.exp(-rank_RC / lam))
        stuck_R1 = ~take_RC.any(dim=1, keepdim=True)
        return take_RC | (candidates_RC & (rank_RC == 0) & stuck_R1)

    return rule
