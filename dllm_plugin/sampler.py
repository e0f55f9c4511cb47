"""Logits -> proposal -> StepOutcome -> SamplerOutput. One batched pass.

No device sync, save what choosing full attention's rows costs (:mod:`dllm_plugin.rows`).
Shape letters as in :mod:`dllm_plugin.plan`.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from dllm_plugin.choices import JOINT
from dllm_plugin.config import DecodeConfig
from dllm_plugin.guidance import partner_places
from dllm_plugin.leads import BlockLeads
from dllm_plugin.logprobs import LogprobStash
from dllm_plugin.plan import Proposal, StepOutcome
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
        device = self.states.device
        if batch.num_draft_tokens_per_req is None and device.type == "cuda":
            self._reserve_peak(logits)
        sampled = torch.zeros(batch.num_reqs, self.num_positions, dtype=torch.int64, device=device)
        num_sampled = torch.zeros(batch.num_reqs, dtype=torch.int32, device=device)
        num_rejected = torch.zeros(batch.num_reqs, dtype=torch.int32, device=device)
        spans = batch.query_start_loc[: batch.num_reqs + 1].diff()
        if self.states.config.full_attention:
            # A pass without a canvas stored nothing that a later one could use.
            num_rejected.copy_(spans)
        elif self.states.config.family.absolute_grid:
            # The prompt's partial block is fed again with the rest of it: canvases begin there.
            slots_R = batch.idx_mapping[: batch.num_reqs]
            tail_R = self.states.tail_N[slots_R]
            ends_R = batch.seq_lens[: batch.num_reqs] == self.states.start_N[slots_R] + tail_R
            num_rejected.copy_(tail_R * ends_R)
        step, logprobs = self.rows.read(logits, batch), None
        if step is not None:
            outcome, tokens_RC, emitted_R, logprobs = self._denoise(step, logits, batch.num_reqs)
            index_R, committed_R = step.index_R, outcome.num_committed_R
            drafts_R = batch.cu_num_logits[: batch.num_reqs + 1].diff()[index_R]
            sampled[index_R] = tokens_RC
            num_sampled[index_R] = emitted_R
            rejected_R = torch.where(
                outcome.refresh_R, batch.seq_lens[index_R], drafts_R - committed_R
            )
            num_rejected[index_R] = rejected_R.to(torch.int32)
            if len(step.slots_np) < len(batch.req_ids) and self.states.config.full_attention:
                self._mirror(batch, (sampled, num_sampled, num_rejected))
        if self.leads is not None:
            self.leads.after_prefill(logits, batch)
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

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

    def _denoise(
        self, step: StepRows, logits_TV: Tensor, num_reqs: int
    ) -> tuple[StepOutcome, Tensor, Tensor, LogprobsTensors | None]:
        """One denoising step: propose, pick, settle, advance.

        Returns the outcome, tokens to emit from position 0 on int64 ``[R, C]``, how many of them
        int32 ``[R]``, and their log-probabilities.
        """
        states, canvas, plan, slots_R = self.states, step.canvas, step.plan, step.slots_R
        mask_id = states.config.mask_token_id
        self.rules.start_step(canvas, slots_R, step.slots_np, step.source_RC)
        self.logprobs.start_step(step.slots_np)
        proposal = self.proposer.rank(step)
        self.rows.keep_carries()
        unmask_RC = self._pick(step, proposal)
        unmask_RC = self.rules.withhold(canvas, proposal, unmask_RC)
        if JOINT in self.policies:
            plan, unmask_RC = keep_edited(canvas, plan, unmask_RC)
        tokens_RC = torch.where(unmask_RC, proposal.token_RC, canvas.tokens_RC)
        tail_R = states.tail_N[slots_R]
        position_C = torch.arange(self.num_positions, device=states.device)
        is_stop_RC = self.rules.is_stop(tokens_RC, slots_R) & (position_C >= tail_R[:, None])
        outcome = self.settle(
            canvas, plan, unmask_RC, tokens_RC, is_stop_RC, step.remaining_R, mask_id
        )
        # A stop token that was replaced is forgotten.
        saw_stop_R = (canvas.saw_stop_R & ~canvas.edits_R) | is_stop_RC.any(dim=1)
        emit_RC = (position_C + tail_R[:, None]).clamp_max(self.num_positions - 1)
        logprobs = self.logprobs.settle(
            step.source_RC, step.num_rows, outcome, emit_RC, slots_R, step.index_R, num_reqs
        )
        lead = None
        if self.leads is not None:
            lead = self.leads.after_commit(step, logits_TV, outcome, tokens_RC)
        states.advance(slots_R, plan, outcome, tokens_RC, saw_stop_R)
        if self.leads is not None and lead is not None:
            self.leads.write(lead)
        emitted_R = (outcome.num_committed_R - tail_R).clamp_min(0)
        return outcome, tokens_RC.gather(1, emit_RC), emitted_R, logprobs

    def _pick(self, step: StepRows, proposal: Proposal) -> Tensor:
        """Apply each request's policy; one batched call per policy present."""
        states, plan, canvas = self.states, step.plan, step.canvas
        settings = states.policy_settings(step.slots_R)
        names = states.policies(step.slots_np)
        unmask_RC = torch.zeros_like(plan.candidates_RC)
        for name in sorted(names):
            take_RC = self.policies[name](plan, canvas, proposal, settings)
            is_mine_R1 = (states.policy.gpu[step.slots_R] == POLICY_IDS[name])[:, None]
            unmask_RC = torch.where(is_mine_R1, take_RC, unmask_RC)
        first_C = torch.arange(self.num_positions, device=states.device) == 0
        return torch.where(plan.leads_R[:, None], plan.candidates_RC & first_C, unmask_RC)
