"""Proposals -> picks -> outcome -> the states: what a step decides, compiled where that pays.

Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.decoding.block_causal import keep_edited
from dllm_plugin.decoding.plan import Canvas, Proposal, StepPlan
from dllm_plugin.decoding.policies import RANKED_BY, Rule
from dllm_plugin.kernels.confidence.reference import RowStats
from dllm_plugin.sampling.compilation import WARMUP_REQUESTS, WARMUP_ROWS, compiled, of_any_length
from dllm_plugin.sampling.first_token import BlockLeads
from dllm_plugin.sampling.logits_rows import StepRows, StepTensors
from dllm_plugin.sampling.logprobs import EmittedLogprobs, LogprobStash
from dllm_plugin.sampling.proposer import Proposer
from dllm_plugin.sampling.token_rules import TokenRules
from dllm_plugin.state.canvas_states import POLICY_IDS, CanvasStates


class Decided(NamedTuple):
    """What a step emits per request: see vLLM's SamplerOutput.

    tokens_RC int64, from position 0 on; emitted_R int32, how many of them; rejected_R int32, by
    how much the computed positions fall back.
    """

    tokens_RC: Tensor
    emitted_R: Tensor
    rejected_R: Tensor
    logprobs: EmittedLogprobs | None


class Variant(NamedTuple):
    """What the requests of a step may ask for: names of policies, and whether `alg_temp`."""

    policies: tuple[str, ...]
    draws_order: bool

    @property
    def reads_ranks(self) -> bool:
        """Whether entropy and margin are needed."""
        return any(RANKED_BY[name] in ("entropy", "margin") for name in self.policies)


class Rest(NamedTuple):
    """What only steps with bad words, log-probabilities or leads need."""

    step: StepRows
    logits_TV: Tensor
    num_reqs: int


class Decider:
    """Decides steps. `usual`: what all requests of a step must ask for to run compiled code."""

    def __init__(
        self,
        states: CanvasStates,
        proposer: Proposer,
        rules: TokenRules,
        logprobs: LogprobStash,
        leads: BlockLeads | None,
    ) -> None:
        self.states = states
        self.proposer = proposer
        self.rules = rules
        self.logprobs = logprobs
        self.leads = leads
        method = states.config.method
        self.policy_rules = {name: policy.rule for name, policy in method.policies.items()}
        self.commit = method.commit
        self.edits = method.edits
        self.keeps_kv = method.keeps_kv
        self.num_positions = states.canvas_NC.shape[1]
        self.decide: Callable[..., Decided] = self.decide_step
        self.usual: Variant | None = None

    def choose(
        self, slots_np: np.ndarray, rest: Rest | None
    ) -> tuple[Callable[..., Decided], Variant]:
        """The function that decides a step of these requests, and what it has to be told."""
        names = tuple(sorted(self.states.policies(slots_np)))
        variant = Variant(names, self.states.uses("alg_temp", slots_np))
        is_usual = rest is None and variant == self.usual
        return self.decide if is_usual else self.decide_step, variant

    def compile(self, backend: str, example: Callable[[int], StepTensors]) -> None:
        """Compile the configured policy for any number of requests, on steps `example` makes."""
        self.decide = compiled(self.decide_step, backend)
        config = self.states.config
        self.usual = usual = Variant((config.policy,), bool(config.defaults.alg_temp))
        for count in WARMUP_REQUESTS:
            tensors = example(count)
            device = self.states.device
            columns = [torch.zeros(WARMUP_ROWS, device=device) for _ in RowStats._fields]
            columns[0] = columns[0].to(torch.int64)
            stats = RowStats(*columns[: 4 if usual.reads_ranks else 2])
            of_any_length(tensors, stats)
            self.decide(*tensors, stats, usual, None)

    def decide_step(
        self,
        slots_R: Tensor,
        canvas: Canvas,
        plan: StepPlan,
        source_RC: Tensor,
        remaining_R: Tensor,
        drafts_R: Tensor,
        seq_lens_R: Tensor,
        stats: RowStats,
        variant: Variant,
        rest: Rest | None,
    ) -> Decided:
        """Pick, settle and advance: tensors to tensors, and to the states.

        Args:
            rest: for bad words, log-probabilities and leads, which keep state of their own; None
                where no request of the step needs any of them.
        """
        states, mask_id = self.states, self.states.config.mask_token_id
        proposal = self.proposer.score(stats, slots_R, source_RC, *variant)
        unmask_RC = self._pick(slots_R, canvas, plan, proposal, variant.policies)
        if rest is not None:
            unmask_RC = self.rules.withhold(canvas, proposal, unmask_RC)
        if self.edits:
            plan, unmask_RC = keep_edited(canvas, plan, unmask_RC)
        tokens_RC = torch.where(unmask_RC, proposal.token_RC, canvas.tokens_RC)
        tail_R = states.tail_N[slots_R]
        position_C = torch.arange(self.num_positions, device=slots_R.device)
        is_stop_RC = self.rules.is_stop(tokens_RC, slots_R) & (position_C >= tail_R[:, None])
        outcome = self.commit(canvas, plan, unmask_RC, tokens_RC, is_stop_RC, remaining_R, mask_id)
        # A stop token that was replaced is forgotten.
        saw_stop_R = (canvas.saw_stop_R & ~canvas.edits_R) | is_stop_RC.any(dim=1)
        emit_RC = (position_C + tail_R[:, None]).clamp_max(self.num_positions - 1)
        logprobs = lead = None
        if rest is not None:
            step, logits_TV, num_reqs = rest
            logprobs = self.logprobs.settle(
                source_RC, step.num_rows, outcome, emit_RC, slots_R, step.index_R, num_reqs
            )
            if self.leads is not None:
                lead = self.leads.after_commit(step, logits_TV, outcome, tokens_RC)
        states.advance(slots_R, plan, outcome, tokens_RC, saw_stop_R)
        if self.leads is not None and lead is not None:
            self.leads.write(lead)
        committed_R = outcome.num_committed_R
        rejected_R = seq_lens_R
        if self.keeps_kv:
            rejected_R = torch.where(outcome.refresh_R, seq_lens_R, drafts_R - committed_R)
        return Decided(
            tokens_RC.gather(1, emit_RC),
            (committed_R - tail_R).clamp_min(0),
            rejected_R.to(torch.int32),
            logprobs,
        )

    def _pick(
        self,
        slots_R: Tensor,
        canvas: Canvas,
        plan: StepPlan,
        proposal: Proposal,
        policies: tuple[str, ...],
    ) -> Tensor:
        """Apply each request's policy; one batched call per rule that may be asked for."""
        settings = self.states.policy_settings(slots_R)
        policy_R1 = self.states.policy.gpu[slots_R][:, None]
        users: dict[Rule, list[str]] = {}
        for name in policies:
            users.setdefault(self.policy_rules[name], []).append(name)
        unmask_RC = torch.zeros_like(plan.candidates_RC)
        for rule, names in users.items():
            take_RC = rule(plan, canvas, proposal, settings)
            for name in names:
                unmask_RC = torch.where(policy_R1 == POLICY_IDS[name], take_RC, unmask_RC)
        first_C = torch.arange(self.num_positions, device=slots_R.device) == 0
        return torch.where(plan.first_only_R[:, None], plan.candidates_RC & first_C, unmask_RC)
