"""Logits -> proposal -> StepOutcome -> SamplerOutput. One batched pass.

No device sync, save what choosing full attention's rows costs (:mod:`dllm_plugin.rows`).
Shape letters as in :mod:`dllm_plugin.plan`.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from dllm_plugin.choices import JOINT
from dllm_plugin.compiled import (
    BACKEND,
    WARMUP_REQUESTS,
    WARMUP_ROWS,
    compiled,
    of_any_length,
)
from dllm_plugin.config import DecodeConfig
from dllm_plugin.guidance import partner_places
from dllm_plugin.kernels.reference import RowStats
from dllm_plugin.leads import BlockLeads
from dllm_plugin.logprobs import LogprobStash
from dllm_plugin.plan import Canvas, Proposal, StepPlan
from dllm_plugin.policies import (
    D2F_RULES,
    FULL_ATTENTION_RULES,
    GRID_RULES,
    POLICIES,
    TIMED_RULES,
    Policy,
)
from dllm_plugin.proposals import Proposer
from dllm_plugin.rows import CHUNK_ROWS, CanvasRows, MaskedRows, StepRows, count_canvases
from dllm_plugin.states import POLICY_IDS, CanvasStates
from dllm_plugin.strategies import (
    STRATEGIES,
    keep_edited,
    plan_leading_position,
    sub_block_to_store,
)
from dllm_plugin.token_rules import TokenRules

NOT_STORED = -1  # slot of a position whose KV is not kept


class Decided(NamedTuple):
    """What a step emits per request: see vLLM's SamplerOutput.

    tokens_RC int64, from position 0 on; emitted_R int32, how many of them; rejected_R int32, by
    how much the computed positions fall back.
    """

    tokens_RC: Tensor
    emitted_R: Tensor
    rejected_R: Tensor
    logprobs: LogprobsTensors | None


class Variant(NamedTuple):
    """What the requests of a step may ask for: names of policies, and whether `alg_temp`."""

    policies: tuple[str, ...]
    draws_order: bool

    @property
    def reads_ranks(self) -> bool:
        """Whether entropy and margin are needed."""
        return bool({"entropy", "topk_margin"} & set(self.policies))


class Rest(NamedTuple):
    """What only steps with bad words, log-probabilities or leads need."""

    step: StepRows
    logits_TV: Tensor
    num_reqs: int


def rules_of(config: DecodeConfig) -> dict[str, Policy]:
    """The function of each policy under the configured strategy."""
    if not config.full_attention:
        rules = GRID_RULES if config.family.absolute_grid else POLICIES
        return D2F_RULES if config.strategy == "d2f" else rules
    timed = config.strategy == "semi_autoregressive" and config.time_schedule
    return TIMED_RULES if timed else FULL_ATTENTION_RULES


class DiffusionSampler:
    """Takes the place of vLLM's sampler in the model runner."""

    def __init__(
        self, sampler: Any, states: CanvasStates, model_config: ModelConfig, max_rows: int
    ) -> None:
        config = states.config
        self.states = states
        self.sampling_states = sampler.sampling_states
        self.penalties_state = SimpleNamespace(output_bin_counts=None)
        plan, self.settle = STRATEGIES[config.strategy]
        if config.leads_with_one:
            plan = plan_leading_position
        rows = MaskedRows if config.full_attention else CanvasRows
        self.rows: MaskedRows | CanvasRows = rows(states, model_config, plan)
        self.policies = rules_of(config)
        self.rules = TokenRules(states, sampler.req_states, model_config.get_vocab_size())
        self.logprobs = LogprobStash(states, model_config)
        self.proposer = Proposer(
            states, self.sampling_states, self.rules, self.logprobs, model_config
        )
        self.leads: BlockLeads | None = None
        if config.commits_alone:
            self.leads = BlockLeads(states, self.rules, self.logprobs, self.proposer.propose)
        self.decide = self.decide_step
        self.variants: tuple[Variant, ...] = ()
        self.max_rows = max_rows
        self.num_positions = states.canvas_NC.shape[1]

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Stage a request's sampling parameters."""
        self.sampling_states.add_request(req_idx, sampling_params)
        self.rules.add_request(req_idx, sampling_params)
        self.logprobs.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        """Bring staged parameters to the device."""
        self.sampling_states.apply_staged_writes()
        self.rules.apply_staged_writes()

    def request_logits(self, batch: InputBatch) -> None:
        """Before the forward: choose the rows that become logits."""
        self.rows.request(batch)

    def trust_block_cache(self, batch: InputBatch, slot_mappings: Tensor) -> None:
        """Before the forward: store no KV but that of the sub-block a request is decoding.

        Fast-dLLM v2 with ``use_block_cache``: once every position of a block has KV, and the first
        token of the sub-block is known, the other sub-blocks' KV stays as it was. They are computed
        all the same, since a row of a canvas costs next to nothing at small batches, and not kept.
        """
        canvases = count_canvases(batch)
        slots_np = batch.idx_mapping_np[:canvases]
        if self.leads is None or not self.states.uses("use_block_cache", slots_np):
            return
        slots_R = batch.idx_mapping[:canvases]
        stops = batch.query_start_loc[: canvases + 1].to(torch.int64)
        canvas, _ = self.states.view(slots_R, stops.diff())
        keep_RC = sub_block_to_store(
            canvas, self.rows.plan(canvas, self.states.config.mask_token_id)
        )
        asks_R1 = (self.states.number("use_block_cache", slots_R) > 0)[:, None]
        drop_RC = asks_R1 & self.states.cached_N[slots_R][:, None] & ~keep_RC
        row_T = torch.arange(batch.num_tokens, device=stops.device)
        request_T = torch.searchsorted(stops, row_T, right=True) - 1
        inside_T = request_T < canvases
        request_T = request_T.clamp_max(canvases - 1)
        place_T = (row_T - stops[request_T]).clamp_max(self.num_positions - 1)
        drop_T = inside_T & drop_RC[request_T, place_T]
        slot_mappings[:, : batch.num_tokens].masked_fill_(drop_T, NOT_STORED)

    def __call__(
        self, logits: Tensor, batch: InputBatch, draft_logits: Tensor | None = None
    ) -> SamplerOutput:
        """Run the step behind the forward.

        Args:
            logits: ``[T, V]``, the rows that `request_logits` asked for.
            batch: the runner's batch; requests with a canvas come first.
        """
        if batch.num_draft_tokens_per_req is None and logits.is_cuda:
            self._reserve_peak(logits)
            if not self.variants:
                self.compile()
                with_carry = isinstance(self.rows, CanvasRows) and self.rows.carry_NV is not None
                wants = {variant.reads_ranks for variant in self.variants}
                self.proposer.warm_up(logits, with_carry, wants)
        step = self.rows.read(logits, batch)
        decided = None if step is None else self._denoise(step, logits, batch.num_reqs)
        if decided is None or len(decided.emitted_R) < batch.num_reqs:
            decided = self._for_whole_batch(batch, step, decided)
        if self.leads is not None:
            self.leads.after_prefill(logits, batch)
        return SamplerOutput(
            sampled_token_ids=decided.tokens_RC,
            logprobs_tensors=decided.logprobs,
            num_nans=None,
            num_sampled=decided.emitted_R,
            num_rejected=decided.rejected_R,
        )

    def _for_whole_batch(
        self, batch: InputBatch, step: StepRows | None, decided: Decided | None
    ) -> Decided:
        """Put results where their requests are in the batch; others emit nothing."""
        num_reqs, device = batch.num_reqs, self.states.device
        sampled = torch.zeros(num_reqs, self.num_positions, dtype=torch.int64, device=device)
        num_sampled = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        num_rejected = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        if self.states.config.full_attention:
            # A pass without a canvas stored nothing that a later one could use.
            num_rejected.copy_(batch.query_start_loc[: num_reqs + 1].diff())
        elif self.states.config.family.absolute_grid:
            # The prompt's partial block is fed again with the rest of it: canvases begin there.
            slots_R = batch.idx_mapping[:num_reqs]
            tail_R = self.states.tail_N[slots_R]
            ends_R = batch.seq_lens[:num_reqs] == self.states.start_N[slots_R] + tail_R
            num_rejected.copy_(tail_R * ends_R)
        results, logprobs = (sampled, num_sampled, num_rejected), None
        if step is not None and decided is not None:
            parts = (decided.tokens_RC, decided.emitted_R, decided.rejected_R)
            for result, part in zip(results, parts, strict=True):
                result[step.index_R] = part
            logprobs = decided.logprobs
            if self.states.config.full_attention:
                self._mirror(batch, results)
        return Decided(*results, logprobs)

    def _mirror(self, batch: InputBatch, results: tuple[Tensor, ...]) -> None:
        """Give hidden partners the results of the requests that they belong to."""
        pairs = partner_places(batch.req_ids)
        if not len(pairs):
            return
        leaders, partners = torch.from_numpy(pairs.T).to(self.states.device)
        for result in results:
            result[partners] = result[leaders]
        self.states.copy_rows(batch.idx_mapping[leaders], batch.idx_mapping[partners])

    def _reserve_peak(self, logits: Tensor) -> None:
        """Let vLLM's memory profile, which runs no canvas, see what a full step allocates.

        Float32 copies are made of CHUNK_ROWS rows at most: the copy, the tempered and filtered
        one, and what top-p sorts (values, int64 indices, probabilities, mask and result).
        """
        num_rows, vocab_size, device = self.max_rows, logits.shape[1], logits.device
        held = [logits.new_empty(num_rows, vocab_size)]
        chunk = min(num_rows, CHUNK_ROWS)
        held += [torch.empty(chunk, vocab_size, device=device) for _ in range(8)]
        # The table of token biases is made when a request first needs one, and then stays.
        held.append(torch.empty(len(self.states.open_N) + 1, vocab_size, device=device))
        del held

    def compile(self, backend: str = BACKEND) -> None:
        """From here on run compiled what keeps no state beside the canvases; compile it now."""
        self.rows.begin = compiled(self.rows.begin_step, backend)
        self.decide = compiled(self.decide_step, backend)
        config = self.states.config
        usual = Variant((config.policy,), bool(config.alg_temp))
        # More than one policy at a time: all that the strategy knows, in one piece of code.
        every = Variant(tuple(sorted(self.policies)), config.time_schedule)
        self.variants = (usual, every)
        self.states.apply_staged_writes()
        self.rules.apply_staged_writes()
        for count in WARMUP_REQUESTS:
            for variant in self.variants:
                tensors = self.rows.example(count)
                device = self.states.device
                columns = [torch.zeros(WARMUP_ROWS, device=device) for _ in RowStats._fields]
                columns[0] = columns[0].to(torch.int64)
                stats = RowStats(*columns[: 4 if variant.reads_ranks else 2])
                of_any_length(tensors, stats)
                self.decide(*tensors, stats, variant, None)

    def _denoise(self, step: StepRows, logits_TV: Tensor, num_reqs: int) -> Decided:
        """One denoising step: propose, pick, settle, advance."""
        self.rules.start_step(step.canvas, step.slots_R, step.slots_np, step.source_RC)
        self.logprobs.start_step(step.slots_np)
        names = tuple(sorted(self.states.policies(step.slots_np)))
        variant = Variant(names, self.states.uses("alg_temp", step.slots_np))
        alone = self.logprobs.active or self.rules.bad_words.active or self.leads is not None
        decide, rest = self.decide_step, Rest(step, logits_TV, num_reqs) if alone else None
        if rest is None and self.variants:
            usual, every = self.variants
            decide, variant = self.decide, usual if variant == usual else every
        stats = self.proposer.propose(
            step.chunks, step.slots_np, step.num_rows, variant.reads_ranks
        )
        self.rows.keep_carries()
        return decide(*step.tensors(), stats, variant, rest)

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
        if JOINT in self.policies:
            plan, unmask_RC = keep_edited(canvas, plan, unmask_RC)
        tokens_RC = torch.where(unmask_RC, proposal.token_RC, canvas.tokens_RC)
        tail_R = states.tail_N[slots_R]
        position_C = torch.arange(self.num_positions, device=slots_R.device)
        is_stop_RC = self.rules.is_stop(tokens_RC, slots_R) & (position_C >= tail_R[:, None])
        outcome = self.settle(canvas, plan, unmask_RC, tokens_RC, is_stop_RC, remaining_R, mask_id)
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
        users: dict[Policy, list[str]] = {}
        for name in policies:
            users.setdefault(self.policies[name], []).append(name)
        unmask_RC = torch.zeros_like(plan.candidates_RC)
        for rule, names in users.items():
            take_RC = rule(plan, canvas, proposal, settings)
            for name in names:
                unmask_RC = torch.where(policy_R1 == POLICY_IDS[name], take_RC, unmask_RC)
        first_C = torch.arange(self.num_positions, device=slots_R.device) == 0
        return torch.where(plan.leads_R[:, None], plan.candidates_RC & first_C, unmask_RC)
