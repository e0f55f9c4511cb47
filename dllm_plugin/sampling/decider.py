"""Decide a step: rank positions, unmask, commit, and move the canvases on.

From the rows' proposals to the states, compiled if no feature is active. Shape letters as in
:mod:`dllm_plugin.decoding.plan`.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm import envs

from dllm_plugin.config.worker_carriers import pack_masks_left
from dllm_plugin.decoding.block_causal import final_run, keep_edited
from dllm_plugin.decoding.plan import Proposal, StepPlan
from dllm_plugin.decoding.policies import RANKED_BY, Rule
from dllm_plugin.kernels.confidence.reference import (
    RowStats,
    counter_uniform,
    sampled_order,
)
from dllm_plugin.state.canvas_states import CanvasStates
from dllm_plugin.state.request_table import POLICY_IDS

from .features.feature import StepFeature
from .features.token_rules import TokenRules
from .step import (
    WARMUP_REQUESTS,
    WARMUP_ROWS,
    Compiled,
    Emitted,
    Step,
    StepTensors,
    allow_any_length,
)

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
        ranked_by = [RANKED_BY[name] for name in self.names]
        return "entropy" in ranked_by or "margin" in ranked_by

    def with_usual(self, known: Collection[str]) -> "StepPolicies":
        """Add the policies compiled by default if they need the same row statistics."""
        if self.want_ranking or self.samples_order:
            return self
        names = {*self.names, *(USUAL & set(known))}
        return self._replace(names=tuple(sorted(names)))

    def are_among(self, others: "StepPolicies") -> bool:
        """Return whether code for the policies `others` serves these."""
        return (
            set(self.names) <= set(others.names)
            and self.samples_order == others.samples_order
            and self.want_ranking == others.want_ranking
        )


class Decider:
    """Decide steps, and write the decisions to the states.

    decide        `decide_plain`, or the compiled form of it
    compiled_for  what requests of a step may ask for to run compiled; None if nothing is compiled
    """

    def __init__(
        self,
        states: CanvasStates,
        sampling_states: Any,
        rules: TokenRules,
        is_async: bool = False,
    ) -> None:
        self.states = states
        self.sampling_states = sampling_states
        self.rules = rules
        method = self.method = states.config.method
        self.mask_id = states.config.mask_token_id
        self.policy_rules: dict[str, Rule] = {}
        for name, policy in method.policies.items():
            self.policy_rules[name] = policy.rule
        self.accept = method.accept
        # vLLM would read counts of masks as broken positions.
        self.sends_left = is_async and not envs.VLLM_RAISE_ON_LOGIT_NANS
        self.num_positions = states.canvas_NC.shape[1]
        self.decide: Callable[..., Emitted] = self.decide_plain
        self.compiled_for: StepPolicies | None = None

    def policies_of(self, slots_np: np.ndarray) -> StepPolicies:
        """Return what the requests of a step ask for."""
        requests = self.states.requests
        names = tuple(sorted(requests.policies(slots_np)))
        return StepPolicies(names, requests.uses("alg_temp", slots_np))

    def run(
        self,
        step: Step,
        stats: RowStats,
        policies: StepPolicies,
        features: Sequence[StepFeature],
    ) -> Emitted:
        """Decide a step, by compiled code if there is any for it and no feature is active."""
        usual = self.compiled_for
        if features or usual is None or not policies.are_among(usual):
            return self.decide_step(step, stats, policies, features)
        return self.decide(step.tensors(), stats, usual)

    def compile(self, backend: str, example: Callable[[int], StepTensors]) -> None:
        """Compile the usual policies for any number of requests, on steps `example` makes."""
        decide = Compiled(self.decide_plain, self.states, backend)
        self.decide = decide
        config = self.states.config
        policies = StepPolicies((config.policy,), bool(config.defaults.alg_temp))
        policies = self.compiled_for = policies.with_usual(self.policy_rules)
        for count in WARMUP_REQUESTS:
            tensors = example(count)
            device = self.states.device
            dtypes = [torch.int64, torch.float32, torch.int32]
            dtypes += [torch.float32] * 2 if policies.want_ranking else []
            columns = []
            for dtype in dtypes:
                columns.append(torch.zeros(WARMUP_ROWS, dtype=dtype, device=device))
            stats = RowStats(*columns)
            allow_any_length(tensors, stats)
            decide(tensors, stats, policies)
        decide.forget()

    def forget(self) -> None:
        """Let torch compare again what it compiled for, after a rule was exchanged."""
        if isinstance(self.decide, Compiled):
            self.decide.forget()

    def decide_plain(
        self, tensors: StepTensors, stats: RowStats, policies: StepPolicies
    ) -> Emitted:
        """Decide a step without active features: the code that is compiled."""
        return self.decide_step(Step(*tensors), stats, policies, ())

    def decide_step(
        self,
        step: Step,
        stats: RowStats,
        policies: StepPolicies,
        features: Sequence[StepFeature],
    ) -> Emitted:
        """Rank, unmask, commit and advance."""
        slots_R = step.slots_R
        step.proposal = self.rank(step, stats, policies)
        step.unmask_RC = self._apply_policies(step, policies.names)
        for feature in reversed(features):
            feature.restrict(step)
        if self.method.edits:
            edited = keep_edited(step.canvas, step.plan, step.unmask_RC)
            step.plan, step.unmask_RC = edited
        if self.accept is not None:
            step.canvas, step.plan, step.unmask_RC = self.accept(
                step.canvas,
                step.plan,
                step.unmask_RC,
                step.proposal,
                self.mask_id,
            )
            for feature in features:
                feature.accept(step)
        self._commit(step)
        step.broken_R = _count_broken(stats, step.source_RC, step.plan)
        for feature in features:
            feature.commit(step)
        self.states.advance(
            slots_R, step.plan, step.outcome, step.tokens_RC, step.saw_stop_R
        )
        return self._emitted(step)

    def rank(self, step: Step, stats: RowStats, policies: StepPolicies) -> Proposal:
        """Return token, confidence and score of every canvas position."""
        slots_R, source_RC = step.slots_R, step.source_RC
        requests = self.states.requests
        policy_R1 = requests.policy.gpu[slots_R][:, None]
        score_RC = confidence_RC = stats.confidence_T[source_RC]
        scores = self._scores(step, stats, policies)
        for name in policies.names:
            if RANKED_BY[name] in scores:
                score = scores[RANKED_BY[name]]
                score_RC = torch.where(policy_R1 == POLICY_IDS[name], score, score_RC)
        if policies.samples_order:
            alg_temp_R1 = requests.number("alg_temp", slots_R)[:, None]
            uniform_RC = self._uniform(slots_R, ALG_TEMP_ORDER)
            score_RC = sampled_order(score_RC, alg_temp_R1, uniform_RC)
        # A row of NaN or of only banned ids must not stop the request's progress.
        return Proposal(
            stats.token_T[source_RC],
            confidence_RC.nan_to_num(0.0),
            score_RC.nan_to_num(-1e30),
        )

    def _scores(
        self, step: Step, stats: RowStats, policies: StepPolicies
    ) -> dict[str, Tensor]:
        """Return the scores other than the confidence that policies of the step rank by."""
        ranked_by = {RANKED_BY[name] for name in policies.names}
        scores: dict[str, Tensor] = {}
        source_RC = step.source_RC
        if stats.entropy_T is not None and stats.margin_T is not None:
            scores["entropy"] = stats.entropy_T[source_RC]
            scores["margin"] = stats.margin_T[source_RC]
        if "position" in ranked_by:
            position_C = torch.arange(source_RC.shape[1], device=source_RC.device)
            scores["position"] = -position_C.to(torch.float32)
        for ranking, use in (("random", RANDOM_ORDER), ("uniform", ORIGIN_ORDER)):
            if ranking in ranked_by:
                scores[ranking] = self._uniform(step.slots_R, use)
        return scores

    def _uniform(self, slots_R: Tensor, use: int) -> Tensor:
        """Return a random number per canvas position, float32 ``[R, C]``."""
        states = self.states
        position_C = torch.arange(self.num_positions, device=states.device)
        position_RC = states.start_N[slots_R][:, None] + position_C
        seed_R1 = (self.sampling_states.seeds.gpu[slots_R] ^ use)[:, None]
        step_R1 = states.counter_N[slots_R].to(torch.int64)[:, None]
        return counter_uniform(seed_R1, position_RC, step_R1)

    def _apply_policies(self, step: Step, names: tuple[str, ...]) -> Tensor:
        """Return what each request's policy unmasks; one batched call per rule of the step."""
        slots_R, plan = step.slots_R, step.plan
        canvas = step.canvas if step.policy_canvas is None else step.policy_canvas
        settings = self.states.requests.policy_settings(slots_R)
        policy_R1 = self.states.requests.policy.gpu[slots_R][:, None]
        users: dict[Rule, list[str]] = {}
        for name in names:
            users.setdefault(self.policy_rules[name], []).append(name)
        unmask_RC = torch.zeros_like(plan.candidates_RC)
        for rule, policies in users.items():
            take_RC = rule(plan, canvas, step.proposal, settings)
            for name in policies:
                uses_R1 = policy_R1 == POLICY_IDS[name]
                unmask_RC = torch.where(uses_R1, take_RC, unmask_RC)
        first_C = torch.arange(self.num_positions, device=slots_R.device) == 0
        only_first_RC = plan.candidates_RC & first_C
        return torch.where(plan.first_only_R[:, None], only_first_RC, unmask_RC)

    def _commit(self, step: Step) -> None:
        """Write tokens, and decide what commits."""
        canvas, unmask_RC = step.canvas, step.unmask_RC
        tokens_RC = torch.where(unmask_RC, step.proposal.token_RC, canvas.tokens_RC)
        position_C = torch.arange(self.num_positions, device=tokens_RC.device)
        tail_R1 = canvas.tail_R[:, None]
        is_stop_RC = self.rules.is_stop(tokens_RC, step.slots_R)
        is_stop_RC = is_stop_RC & (position_C >= tail_R1)
        run_R, final_R = final_run(
            canvas, step.plan, tokens_RC, is_stop_RC, step.remaining_R, self.mask_id
        )
        step.outcome = self.method.commit(canvas, step.plan, unmask_RC, run_R, final_R)
        step.tokens_RC = tokens_RC
        # A stop token that was replaced no longer counts.
        saw_before_R = canvas.saw_stop_R & ~canvas.edits_R
        step.saw_stop_R = saw_before_R | is_stop_RC.any(dim=1)
        step.emit_RC = (position_C + tail_R1).clamp_max(self.num_positions - 1)

    def _emitted(self, step: Step) -> Emitted:
        """Return what the host reads of a step."""
        broken_R, left_R = step.broken_R, None
        if self.method.logits == "masked":
            left_R = self._count_left(step)
            if self.sends_left:
                broken_R = pack_masks_left(broken_R, left_R)
        emitted_R = step.outcome.num_committed_R - step.canvas.tail_R
        return Emitted(
            step.tokens_RC.gather(1, step.emit_RC),
            emitted_R.clamp_min(0),
            self._rejected(step),
            broken_R,
            step.logprobs,
            left_R,
        )

    def _count_left(self, step: Step) -> Tensor:
        """Count masks of current blocks that go on; 0 for others, and for void steps."""
        is_masked_RC = step.tokens_RC == self.mask_id
        goes_on_R = step.plan.active_RS.any(dim=1) & ~step.outcome.refresh_R
        in_block_RC = step.canvas.block_RC == 0
        is_left_RC = is_masked_RC & in_block_RC & goes_on_R[:, None]
        return is_left_RC.sum(dim=1, dtype=torch.int32)

    def _rejected(self, step: Step) -> Tensor:
        """Return by how much computed positions fall back: to the canvas, or to the refresh."""
        rejected_R = step.seq_lens_R
        if step.refresh_R is not None:
            rejected_R = rejected_R - step.refresh_R
        if self.method.keeps_kv:
            outcome = step.outcome
            uncommitted_R = step.drafts_R - outcome.num_committed_R
            rejected_R = torch.where(outcome.refresh_R, rejected_R, uncommitted_R)
        return rejected_R.to(torch.int32)


def _count_broken(stats: RowStats, source_RC: Tensor, plan: StepPlan) -> Tensor:
    """Count positions that want a token and have NaN or infinite logits."""
    wanted_RC = plan.candidates_RC | plan.editable_RC
    return (stats.broken_T[source_RC] * wanted_RC).sum(dim=1, dtype=torch.int32)
