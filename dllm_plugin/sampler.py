"""Logits -> proposal -> StepOutcome -> SamplerOutput. One batched pass, no device sync.

Shape letters as in :mod:`dllm_plugin.plan`.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from dllm_plugin.kernels.reference import at_rows, counter_uniform, row_stats
from dllm_plugin.logprobs import LogprobStash
from dllm_plugin.plan import Canvas, Proposal, StepPlan
from dllm_plugin.policies import POLICIES
from dllm_plugin.states import POLICY_IDS, CanvasStates
from dllm_plugin.strategies import STRATEGIES, settle
from dllm_plugin.token_rules import TokenRules

# Rows sampled at once: bounds the fp32 copy of the logits.
CHUNK_ROWS = 1024
WARMUP_PREFIX = "_warmup_"
POLICY_NAMES = tuple(POLICIES)
RANDOM_ORDER = 0x5D2F  # separates the ranking stream of policy `random` from the token stream


class RowChunk(NamedTuple):
    """Some logits rows of a step.

    rows_T int64, index among all rows of the step; logits_TV model dtype; slot_T int64;
    position_T int64, absolute position a row predicts.
    """

    rows_T: Tensor
    logits_TV: Tensor
    slot_T: Tensor
    position_T: Tensor


class DiffusionSampler:
    """Takes the place of vLLM's sampler in the model runner."""

    def __init__(
        self, sampler: Any, states: CanvasStates, model_config: ModelConfig, max_rows: int
    ) -> None:
        self.states = states
        self.sampling_states = sampler.sampling_states
        self.penalties_state = SimpleNamespace(output_bin_counts=None)
        self.plan = STRATEGIES[states.config.strategy]
        self.rules = TokenRules(states, sampler.req_states, model_config.get_vocab_size())
        self.logprobs = LogprobStash(states, model_config)
        num_slots, num_positions = states.canvas_NC.shape
        self.carry_NV: Tensor | None = None
        self.max_rows = max_rows
        if states.config.family.logits_shift:
            # Row of the last committed position: it predicts the first one of the canvas.
            torch_dtype = model_config.dtype
            assert isinstance(torch_dtype, torch.dtype)
            self.carry_NV = torch.zeros(
                num_slots,
                model_config.get_vocab_size(),
                dtype=torch_dtype,
                device=states.device,
            )
        self.num_positions = num_positions

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
        """Before the forward: ask for the last row of each prefill when logits are shifted."""
        num_canvases = _num_canvases(batch)
        if self.carry_NV is None or not batch.is_prefilling_np[num_canvases:].any():
            return
        # vLLM's warm-up hands a grammar to its prefills and expects them to have no rows.
        # Ids of clients end in what vLLM appends to them, never in "_".
        if batch.req_ids[0].startswith(WARMUP_PREFIX) and batch.req_ids[0].endswith("_"):
            return
        last = batch.query_start_loc[num_canvases + 1 : batch.num_reqs + 1] - 1
        batch.logits_indices = torch.cat([batch.logits_indices, last.to(torch.int64)])

    def __call__(
        self, logits: Tensor, batch: InputBatch, draft_logits: Tensor | None = None
    ) -> SamplerOutput:
        """Run the step behind the forward.

        Args:
            logits: ``[T, V]``, rows of the canvases, then (shifted) one per prefill.
            batch: the runner's batch; requests with a canvas come first.
        """
        num_canvases, num_rows = _num_canvases(batch), batch.num_draft_tokens
        device = self.states.device
        if batch.num_draft_tokens_per_req is None and device.type == "cuda":
            self._reserve_peak(logits)
        sampled = torch.zeros(batch.num_reqs, self.num_positions, dtype=torch.int64, device=device)
        num_sampled = torch.zeros(batch.num_reqs, dtype=torch.int32, device=device)
        num_rejected = torch.zeros(batch.num_reqs, dtype=torch.int32, device=device)
        if self.carry_NV is not None and num_rows < logits.shape[0]:
            prefilled = batch.idx_mapping[num_canvases : batch.num_reqs]
            # Warm-up batches bring rows that no prefill asked for.
            if len(prefilled) == logits.shape[0] - num_rows:
                self.carry_NV[prefilled] = logits[num_rows:].to(self.carry_NV.dtype)
        logprobs = None
        if num_canvases:
            committed_R, logprobs = self._denoise(
                logits[:num_rows], batch, num_canvases, sampled[:num_canvases]
            )
            num_sampled[:num_canvases] = committed_R
            fed_R = batch.cu_num_logits[: num_canvases + 1].diff()
            num_rejected[:num_canvases] = fed_R - committed_R
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _reserve_peak(self, logits: Tensor) -> None:
        """Let vLLM's memory profile, which runs no canvas, see what a full step allocates."""
        num_rows = self.max_rows
        held = [logits.new_empty(num_rows, logits.shape[1])]
        chunk = min(num_rows, CHUNK_ROWS)
        held += [torch.empty(chunk, logits.shape[1], device=logits.device) for _ in range(5)]
        # The table of token biases is made when a request first needs one, and then stays.
        held.append(torch.empty(len(self.states.open_N) + 1, logits.shape[1], device=logits.device))
        del held

    def _denoise(
        self, logits_TV: Tensor, batch: InputBatch, num_canvases: int, sampled_RC: Tensor
    ) -> tuple[Tensor, LogprobsTensors | None]:
        """One denoising step: plan, propose, pick, settle, advance."""
        states, slots_np = self.states, batch.idx_mapping_np[:num_canvases]
        slots_R = batch.idx_mapping[:num_canvases]
        mask_id = states.config.mask_token_id
        fed_R = batch.cu_num_logits[: num_canvases + 1].diff().to(torch.int64)
        canvas, remaining_R = states.view(slots_R, fed_R)
        plan = self.plan(canvas, mask_id)
        source_RC = self._source_rows(batch, num_canvases)
        chunks = list(self._chunks(logits_TV, batch, slots_R, plan, source_RC))
        self.rules.start_step(canvas, slots_R, slots_np, source_RC)
        self.logprobs.start_step(slots_np)
        stats = [self._propose(chunk, slots_np) for chunk in chunks]
        num_rows = len(logits_TV) + (0 if self.carry_NV is None else num_canvases)
        rows = [chunk.rows_T for chunk in chunks]
        proposal = Proposal(
            *(at_rows(part, rows, num_rows)[source_RC] for part in zip(*stats, strict=True))
        )
        unmask_RC = self._pick(plan, canvas, proposal, slots_R, slots_np)
        unmask_RC = self.rules.withhold(canvas, proposal, unmask_RC)
        tokens_RC = torch.where(unmask_RC, proposal.token_RC, canvas.tokens_RC)
        is_stop_RC = self.rules.is_stop(tokens_RC, slots_R)
        outcome = settle(canvas, plan, unmask_RC, tokens_RC, is_stop_RC, remaining_R, mask_id)
        saw_stop_R = canvas.saw_stop_R | is_stop_RC.any(dim=1)
        sampled_RC.copy_(tokens_RC)
        logprobs = self.logprobs.settle(source_RC, num_rows, outcome, slots_R, batch.num_reqs)
        states.advance(slots_R, plan, outcome, tokens_RC, saw_stop_R)
        return outcome.num_committed_R, logprobs

    def _source_rows(self, batch: InputBatch, num_canvases: int) -> Tensor:
        """Row that predicts each canvas position, int64 ``[R, C]``; clamped behind the span."""
        shift = 0 if self.carry_NV is None else 1
        bounds = batch.cu_num_logits[: num_canvases + 1].to(torch.int64)
        position_C = torch.arange(self.num_positions, device=self.states.device)
        source_RC = torch.minimum(bounds[:-1, None] + position_C - shift, bounds[1:, None] - 1)
        if shift:
            # The carry rows stand behind the rows of this forward.
            request_R = torch.arange(num_canvases, device=self.states.device)
            source_RC[:, 0] = batch.num_draft_tokens + request_R
        return source_RC

    def _chunks(
        self,
        logits_TV: Tensor,
        batch: InputBatch,
        slots_R: Tensor,
        plan: StepPlan,
        source_RC: Tensor,
    ) -> Iterator[RowChunk]:
        """The rows to propose from, at most CHUNK_ROWS at a time."""
        states, shift = self.states, 0 if self.carry_NV is None else 1
        slot_T = batch.expanded_idx_mapping
        position_T = states.start_N[slot_T] + batch.expanded_local_pos + shift
        parts = [(logits_TV, slot_T, position_T)]
        if self.carry_NV is not None:
            carry_RV = self.carry_NV[slots_R]
            # The row of the last position that commits now serves the next steps.
            moved_R1 = plan.num_committed_R[:, None]
            row_R = batch.cu_num_logits[: len(slots_R)] + moved_R1[:, 0].clamp_min(1) - 1
            new_RV = logits_TV[row_R.to(torch.int64)].to(carry_RV.dtype)
            self.carry_NV[slots_R] = torch.where(moved_R1 > 0, new_RV, carry_RV)
            parts.append((carry_RV, slots_R, states.start_N[slots_R]))
        first = 0
        for logits, slots, positions in parts:
            rows = torch.arange(first, first + len(logits), device=states.device)
            if states.device.type == "cpu":
                # There is no device to wait for, so rows that propose for nothing are left out.
                chosen = torch.isin(rows, source_RC[plan.candidates_RC])
                rows, logits = rows[chosen], logits[chosen]
                slots, positions = slots[chosen], positions[chosen]
            for low in range(0, max(len(rows), 1), CHUNK_ROWS):
                part = slice(low, low + CHUNK_ROWS)
                yield RowChunk(rows[part], logits[part], slots[part], positions[part])
            first += len(parts[0][0])

    def _propose(self, chunk: RowChunk, slots_np: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Token, confidence and score of some rows.

        Order: banned and biased ids, temperature, min_p, top-k and top-p, softmax.
        """
        states, sampling = self.states, self.sampling_states
        logits_TV = chunk.logits_TV.to(torch.float32, copy=self.logprobs.active)
        self.rules.apply(logits_TV, chunk.rows_T, chunk.slot_T, chunk.position_T, slots_np)
        step_T, seed_T = states.step_N[chunk.slot_T], sampling.seeds.gpu[chunk.slot_T]
        uniform_T = None
        if sampling.temperature.np[slots_np].any():
            temperature_T = sampling.temperature.gpu[chunk.slot_T]
            draws_T = temperature_T > 0
            logits_TV /= temperature_T.where(draws_T, 1.0)[:, None]
            uniform_T = counter_uniform(seed_T, chunk.position_T, step_T)
            uniform_T = uniform_T.where(draws_T, float("nan"))
            logits_TV = self._filter(logits_TV, chunk.slot_T, slots_np)
        policies = set(states.policy.np[slots_np].tolist())
        stats, entropy_T, margin_T = row_stats(
            logits_TV,
            uniform_T,
            want_entropy=POLICY_IDS["entropy"] in policies,
            want_margin=POLICY_IDS["topk_margin"] in policies,
        )
        scores = {"entropy": entropy_T, "topk_margin": margin_T}
        if POLICY_IDS["random"] in policies:
            scores["random"] = counter_uniform(seed_T ^ RANDOM_ORDER, chunk.position_T, step_T)
        score_T, policy_T = stats.score_T, states.policy.gpu[chunk.slot_T]
        for name, value_T in scores.items():
            if value_T is not None:
                score_T = torch.where(policy_T == POLICY_IDS[name], value_T, score_T)
        self.logprobs.score(chunk.logits_TV, stats.token_T, chunk.rows_T)
        # A row of NaN or of banned ids alone must not stop the request's progress.
        return stats.token_T, stats.confidence_T.nan_to_num(0.0), score_T.nan_to_num(-1e30)

    def _filter(self, logits_TV: Tensor, slot_T: Tensor, slots_np: np.ndarray) -> Tensor:
        sampling = self.sampling_states
        if not len(logits_TV):
            return logits_TV
        if sampling.min_p.np[slots_np].any():
            floor_T = logits_TV.amax(dim=-1) + sampling.min_p.gpu[slot_T].log()
            logits_TV.masked_fill_(logits_TV < floor_T[:, None], float("-inf"))
        top_k, top_p = sampling.get_top_k_top_p(slot_T, slots_np)
        if top_k is None and top_p is None:
            return logits_TV
        return apply_top_k_top_p(logits_TV, top_k, top_p)

    def _pick(
        self,
        plan: StepPlan,
        canvas: Canvas,
        proposal: Proposal,
        slots_R: Tensor,
        slots_np: np.ndarray,
    ) -> Tensor:
        """Apply each request's policy; one batched call per policy present."""
        states, settings = self.states, self.states.policy_settings(slots_R)
        accepts_by_threshold = states.config.strategy == "d2f"
        names = {POLICY_NAMES[i] for i in set(states.policy.np[slots_np].tolist())}
        rules = {name: "threshold" if accepts_by_threshold else name for name in names}
        unmask_RC = torch.zeros_like(plan.candidates_RC)
        for name in sorted(names):
            take_RC = POLICIES[rules[name]](plan, canvas, proposal, settings)
            is_mine_R1 = (states.policy.gpu[slots_R] == POLICY_IDS[name])[:, None]
            unmask_RC = torch.where(is_mine_R1, take_RC, unmask_RC)
        return unmask_RC


def _num_canvases(batch: InputBatch) -> int:
    drafts = batch.num_draft_tokens_per_req
    return 0 if drafts is None else int(np.count_nonzero(drafts))
