"""Rank canvas positions: compute the score that the policy of each request sorts by.

Part of what ``compile_step`` compiles. Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_plugin.decoding.plan import Proposal
from dllm_plugin.decoding.policies import RANKED_BY
from dllm_plugin.kernels.confidence.reference import (
    RowStats,
    counter_uniform,
    sampled_order,
)
from dllm_plugin.state.canvas_states import CanvasStates
from dllm_plugin.state.request_table import POLICY_IDS

# Separate the random numbers of a request by their use: xor-ed into its seed. Tokens use the seed
# as it is.
RANDOM_ORDER = 0x5D2F
ORIGIN_ORDER = 0x0B16
ALG_TEMP_ORDER = 0xA16
USUAL = {"threshold", "low_confidence"}  # policies that most requests ask for


class StepPolicies(NamedTuple):
    """List the policies of a step, and whether a request asks for `alg_temp`."""

    names: tuple[str, ...]
    samples_order: bool

    @property
    def want_ranking(self) -> bool:
        """Return whether a policy ranks by entropy or margin."""
        return any(RANKED_BY[name] in ("entropy", "margin") for name in self.names)

    def with_usual(self, known: Collection[str]) -> "StepPolicies":
        """Add the policies compiled by default if they need the same row statistics."""
        if self.want_ranking or self.samples_order:
            return self
        return self._replace(names=tuple(sorted({*self.names, *(USUAL & set(known))})))

    def are_among(self, others: "StepPolicies") -> bool:
        """Return whether code for the policies `others` serves these."""
        return (
            set(self.names) <= set(others.names)
            and self.samples_order == others.samples_order
            and self.want_ranking == others.want_ranking
        )


class Ranking:
    """Compute proposals of canvas positions from row statistics."""

    def __init__(self, states: CanvasStates, sampling_states: Any) -> None:
        self.states = states
        self.sampling_states = sampling_states

    def rank(
        self,
        stats: RowStats,
        slots_R: Tensor,
        source_RC: Tensor,
        policies: StepPolicies,
    ) -> Proposal:
        """Return token, confidence and score of every canvas position."""
        states = self.states
        policy_R1 = states.requests.policy.gpu[slots_R][:, None]
        confidence_RC = stats.confidence_T[source_RC]
        scores = self._scores(stats, slots_R, source_RC, policies)
        score_RC = confidence_RC
        for name in policies.names:
            if RANKED_BY[name] in scores:
                score = scores[RANKED_BY[name]]
                score_RC = torch.where(policy_R1 == POLICY_IDS[name], score, score_RC)
        if policies.samples_order:
            alg_temp_R1 = states.requests.number("alg_temp", slots_R)[:, None]
            score_RC = sampled_order(
                score_RC, alg_temp_R1, self._uniform(slots_R, ALG_TEMP_ORDER)
            )
        # A row of NaN or of only banned ids must not stop the request's progress.
        return Proposal(
            stats.token_T[source_RC],
            confidence_RC.nan_to_num(0.0),
            score_RC.nan_to_num(-1e30),
        )

    def _scores(
        self,
        stats: RowStats,
        slots_R: Tensor,
        source_RC: Tensor,
        policies: StepPolicies,
    ) -> dict[str, Tensor]:
        """Return the scores other than the confidence that policies of the step rank by."""
        ranked_by = {RANKED_BY[name] for name in policies.names}
        scores: dict[str, Tensor] = {}
        if stats.entropy_T is not None and stats.margin_T is not None:
            scores["entropy"] = stats.entropy_T[source_RC]
            scores["margin"] = stats.margin_T[source_RC]
        if "position" in ranked_by:
            position_C = torch.arange(source_RC.shape[1], device=source_RC.device)
            scores["position"] = -position_C.to(torch.float32)
        for ranking, use in (("random", RANDOM_ORDER), ("uniform", ORIGIN_ORDER)):
            if ranking in ranked_by:
                scores[ranking] = self._uniform(slots_R, use)
        return scores

    def _uniform(self, slots_R: Tensor, use: int) -> Tensor:
        """Return a random number per canvas position, float32 ``[R, C]``."""
        states = self.states
        position_C = torch.arange(states.canvas_NC.shape[1], device=states.device)
        position_RC = states.start_N[slots_R][:, None] + position_C
        seed_R1 = (self.sampling_states.seeds.gpu[slots_R] ^ use)[:, None]
        step_R1 = states.counter_N[slots_R].to(torch.int64)[:, None]
        return counter_uniform(seed_R1, position_RC, step_R1)
