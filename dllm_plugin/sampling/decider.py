"""Decide a step: which positions are unmasked, what commits, and how the canvases move on.

From the rows' proposals to the states, compiled where that pays. Shape letters as in
:mod:`dllm_plugin.decoding.plan`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm import envs

from dllm_plugin.decoding.block_causal import keep_edited
from dllm_plugin.decoding.full_attention import commit_given, without_given
from dllm_plugin.decoding.plan import Canvas, Proposal, StepOutcome, StepPlan
from dllm_plugin.decoding.policies import Rule
from dllm_plugin.grammar.step import Constraint, fix_stop, take_frontier
from dllm_plugin.kernels.confidence.reference import RowStats
from dllm_plugin.sampling.compilation import (
    WARMUP_REQUESTS,
    WARMUP_ROWS,
    allow_any_length,
    compiled,
)
from dllm_plugin.sampling.features.automata import Automata, AutomatonStep
from dllm_plugin.sampling.features.first_token import FirstTokenDecoder, FirstTokens
from dllm_plugin.sampling.features.logprobs import EmittedLogprobs, LogprobStash
from dllm_plugin.sampling.features.targets import Targets
from dllm_plugin.sampling.features.token_rules import TokenRules
from dllm_plugin.sampling.features.watched_rows import WatchedRows
from dllm_plugin.sampling.ranking import Ranking, StepPolicies
from dllm_plugin.sampling.rows import StepRows, StepTensors
from dllm_plugin.state.canvas_states import CanvasStates
from dllm_plugin.state.request_table import POLICY_IDS


class EmittedTokens(NamedTuple):
    """Hold what a step emits per request: see vLLM's SamplerOutput.

    tokens_RC   int64, from position 0 on
    emitted_R   int32, how many of them are emitted
    rejected_R  int32, by how much the request's computed positions fall back
    broken_R    int32, positions whose logits were NaN or infinite where a token was wanted
                Asynchronous full attention sends `-left_R` along in it where there are none.
    left_R      int32, positions that are still masked in blocks that go on, 0 in others; None where
                nobody counts them
    """

    tokens_RC: Tensor
    emitted_R: Tensor
    rejected_R: Tensor
    broken_R: Tensor
    logprobs: EmittedLogprobs | None
    left_R: Tensor | None = None


class StatefulInputs(NamedTuple):
    """Hold what features with state of their own need. A step that has any runs uncompiled.

    They are bad words of several tokens, log-probabilities, grammars, watched requests, templates,
    and Fast-dLLM v2's first tokens: :meth:`Decider.stateful_inputs` is the one place that says so.
    """

    step: StepRows
    logits_TV: Tensor
    num_reqs: int
    constraint: Constraint | None
    automata: AutomatonStep | None


class Decider:
    """Decide steps, and write what is decided to the states.

    decide        `decide_step`, or the compiled form of it
    compiled_for  what requests of a step may ask for to run compiled; None: nothing is
    """

    def __init__(
        self,
        states: CanvasStates,
        ranking: Ranking,
        rules: TokenRules,
        logprobs: LogprobStash,
        first_tokens: FirstTokenDecoder | None,
        watched: WatchedRows,
        targets: Targets,
        automata: Automata,
        is_async: bool = False,
    ) -> None:
        self.states = states
        self.ranking = ranking
        self.rules = rules
        self.logprobs = logprobs
        self.first_tokens = first_tokens
        self.watched = watched
        self.targets = targets
        self.automata = automata
        method = states.config.method
        self.policy_rules = {
            name: policy.rule for name, policy in method.policies.items()
        }
        self.commit = method.commit
        self.edits = method.edits
        self.keeps_kv = method.keeps_kv
        self.counts_masks = method.logits == "masked"
        # vLLM would take what is left for broken positions.
        self.sends_left = is_async and not envs.VLLM_RAISE_ON_LOGIT_NANS
        self.num_positions = states.canvas_NC.shape[1]
        self.decide: Callable[..., EmittedTokens] = self.decide_step
        self.compiled_for: StepPolicies | None = None

    def policies_of(self, slots_np: np.ndarray) -> StepPolicies:
        """Return what the requests of a step ask for."""
        names = tuple(sorted(self.states.requests.policies(slots_np)))
        return StepPolicies(names, self.states.requests.uses("alg_temp", slots_np))

    def stateful_inputs(
        self,
        step: StepRows,
        logits_TV: Tensor,
        num_reqs: int,
        constraint: Constraint | None = None,
        automata: AutomatonStep | None = None,
    ) -> StatefulInputs | None:
        """Return what features with state of their own need; None if the step has none of them."""
        has_state = (
            self.logprobs.active
            or self.rules.bad_words.active
            or self.first_tokens is not None
            or constraint is not None
            or automata is not None
            or self.watched.active
            or self.states.templates.active
        )
        if not has_state:
            return None
        return StatefulInputs(step, logits_TV, num_reqs, constraint, automata)

    def run(
        self,
        step: StepRows,
        stats: RowStats,
        policies: StepPolicies,
        stateful: StatefulInputs | None,
    ) -> EmittedTokens:
        """Decide a step, by compiled code where that was compiled for such a step."""
        usual = self.compiled_for
        if stateful is None and usual is not None and policies.are_among(usual):
            return self.decide(*step.tensors(), stats, usual, None)
        return self.decide_step(*step.tensors(), stats, policies, stateful)

    def compile(self, backend: str, example: Callable[[int], StepTensors]) -> None:
        """Compile the usual policies for any number of requests, on steps `example` makes."""
        self.decide = compiled(self.decide_step, backend)
        config = self.states.config
        policies = StepPolicies((config.policy,), bool(config.defaults.alg_temp))
        policies = self.compiled_for = policies.with_usual(self.policy_rules)
        for count in WARMUP_REQUESTS:
            tensors = example(count)
            device = self.states.device
            columns = [
                torch.zeros(WARMUP_ROWS, device=device) for _ in RowStats._fields
            ]
            columns[0], columns[2] = (
                columns[0].to(torch.int64),
                columns[2].to(torch.int32),
            )
            stats = RowStats(*columns[: 5 if policies.want_ranking else 3])
            allow_any_length(tensors, stats)
            self.decide(*tensors, stats, policies, None)

    def decide_step(
        self,
        slots_R: Tensor,
        canvas: Canvas,
        plan: StepPlan,
        source_RC: Tensor,
        remaining_R: Tensor,
        drafts_R: Tensor,
        seq_lens_R: Tensor,
        refresh_R: Tensor | None,
        stats: RowStats,
        policies: StepPolicies,
        stateful: StatefulInputs | None,
    ) -> EmittedTokens:
        """Rank, unmask, commit and advance; the first arguments are those of StepTensors."""
        states, mask_id = self.states, self.states.config.mask_token_id
        proposal = self.ranking.rank(stats, slots_R, source_RC, policies)
        given_RC, to_decide = None, canvas
        if states.templates.active:
            given_RC = states.given(slots_R)
            plan, to_decide = without_given(plan, canvas, given_RC)
        unmask_RC = self._apply_policies(
            slots_R, to_decide, plan, proposal, policies.names
        )
        constraint = None if stateful is None else stateful.constraint
        if stateful is not None:
            unmask_RC = self.targets.take(slots_R, plan.candidates_RC, unmask_RC)
            unmask_RC = self.rules.withhold(canvas, proposal, unmask_RC)
        if constraint is not None:
            unmask_RC = take_frontier(constraint, plan, unmask_RC)
        if self.edits:
            plan, unmask_RC = keep_edited(canvas, plan, unmask_RC)
        tokens_RC = torch.where(unmask_RC, proposal.token_RC, canvas.tokens_RC)
        tail_R = states.tail_N[slots_R]
        position_C = torch.arange(self.num_positions, device=slots_R.device)
        is_stop_RC = self.rules.is_stop(tokens_RC, slots_R) & (
            position_C >= tail_R[:, None]
        )
        if constraint is not None:
            plan = fix_stop(constraint, plan, unmask_RC, is_stop_RC)
        outcome = self.commit(
            canvas, plan, unmask_RC, tokens_RC, is_stop_RC, remaining_R, mask_id
        )
        if given_RC is not None:
            outcome = commit_given(canvas, outcome, tokens_RC, mask_id)
        # A stop token that was replaced is forgotten.
        saw_stop_R = (canvas.saw_stop_R & ~canvas.edits_R) | is_stop_RC.any(dim=1)
        emit_RC = (position_C + tail_R[:, None]).clamp_max(self.num_positions - 1)
        broken_R = _count_broken(stats, source_RC, plan)
        logprobs = first = None
        if stateful is not None:
            logprobs, first = self._commit_stateful(
                stateful, outcome, tokens_RC, emit_RC, given_RC
            )
            certain_RC, index_R = proposal.confidence_RC, stateful.step.index_R
            self.watched.commit(
                slots_R, outcome, certain_RC, tokens_RC, emit_RC, tail_R, index_R
            )
        states.advance(slots_R, plan, outcome, tokens_RC, saw_stop_R)
        if self.first_tokens is not None and first is not None:
            self.first_tokens.write(first)
            broken_R = broken_R + first.broken_R
        return self._sent(
            tokens_RC.gather(1, emit_RC),
            (outcome.num_committed_R - tail_R).clamp_min(0),
            self._rejected(outcome, drafts_R, seq_lens_R, refresh_R),
            broken_R,
            logprobs,
            self._left(canvas, plan, outcome, tokens_RC) if self.counts_masks else None,
        )

    def _sent(
        self,
        tokens_RC: Tensor,
        emitted_R: Tensor,
        rejected_R: Tensor,
        broken_R: Tensor,
        logprobs: EmittedLogprobs | None,
        left_R: Tensor | None,
    ) -> EmittedTokens:
        """Return what the host is told: what is left as well, where it launches ahead."""
        if self.sends_left and left_R is not None:
            broken_R = torch.where(broken_R > 0, broken_R, -left_R)
        return EmittedTokens(
            tokens_RC, emitted_R, rejected_R, broken_R, logprobs, left_R
        )

    def _left(
        self, canvas: Canvas, plan: StepPlan, outcome: StepOutcome, tokens_RC: Tensor
    ) -> Tensor:
        """Count what is still masked of current blocks; nothing of those done, or of void steps."""
        is_left_RC = (tokens_RC == self.states.config.mask_token_id) & (
            canvas.block_RC == 0
        )
        counts_R = plan.active_RS.any(dim=1) & ~outcome.refresh_R
        is_left_RC = is_left_RC & counts_R[:, None]
        return is_left_RC.sum(dim=1, dtype=torch.int32)

    def _apply_policies(
        self,
        slots_R: Tensor,
        canvas: Canvas,
        plan: StepPlan,
        proposal: Proposal,
        names: tuple[str, ...],
    ) -> Tensor:
        """Return what each request's policy unmasks; one batched call per rule of the step."""
        settings = self.states.requests.policy_settings(slots_R)
        policy_R1 = self.states.requests.policy.gpu[slots_R][:, None]
        users: dict[Rule, list[str]] = {}
        for name in names:
            users.setdefault(self.policy_rules[name], []).append(name)
        unmask_RC = torch.zeros_like(plan.candidates_RC)
        for rule, policies in users.items():
            take_RC = rule(plan, canvas, proposal, settings)
            for name in policies:
                unmask_RC = torch.where(
                    policy_R1 == POLICY_IDS[name], take_RC, unmask_RC
                )
        first_C = torch.arange(self.num_positions, device=slots_R.device) == 0
        return torch.where(
            plan.first_only_R[:, None], plan.candidates_RC & first_C, unmask_RC
        )

    def _commit_stateful(
        self,
        stateful: StatefulInputs,
        outcome: StepOutcome,
        tokens_RC: Tensor,
        emit_RC: Tensor,
        given_RC: Tensor | None,
    ) -> tuple[EmittedLogprobs | None, FirstTokens | None]:
        """Commit log-probabilities and states, and propose first tokens of the next blocks."""
        step, logits_TV, num_reqs, _, automata = stateful
        if automata is not None:
            self.automata.advance(automata, step, outcome)
        given = None if given_RC is None else (given_RC, tokens_RC)
        logprobs = self.logprobs.commit(step, outcome, emit_RC, num_reqs, given)
        if self.first_tokens is None:
            return logprobs, None
        first = self.first_tokens.propose_after_commit(
            step, logits_TV, outcome, tokens_RC
        )
        return logprobs, first

    def _rejected(
        self,
        outcome: StepOutcome,
        drafts_R: Tensor,
        seq_lens_R: Tensor,
        refresh_R: Tensor | None,
    ) -> Tensor:
        """Return by how much computed positions fall back: to the canvas, or to the refresh."""
        rejected_R = seq_lens_R if refresh_R is None else seq_lens_R - refresh_R
        if self.keeps_kv:
            uncommitted_R = drafts_R - outcome.num_committed_R
            rejected_R = torch.where(outcome.refresh_R, rejected_R, uncommitted_R)
        return rejected_R.to(torch.int32)


def _count_broken(stats: RowStats, source_RC: Tensor, plan: StepPlan) -> Tensor:
    """Count positions whose logits were NaN or infinite where a token was wanted."""
    wanted_RC = plan.candidates_RC | plan.editable_RC
    return (stats.broken_T[source_RC] * wanted_RC).sum(dim=1, dtype=torch.int32)
