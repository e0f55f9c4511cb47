"""Sample a denoising step in place of vLLM's sampler: propose, unmask, commit, emit.

Nothing waits for the device. Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from dllm_plugin.config.memory import StepSize, reserved_bytes
from dllm_plugin.config.worker_carriers import pack_broken, pack_canvases
from dllm_plugin.decoding.block_causal import sub_block_to_store
from dllm_plugin.kernels.launch import compile_ahead
from dllm_plugin.sampling.canvas_rows import CanvasRows
from dllm_plugin.sampling.decider import Decider
from dllm_plugin.sampling.features.ordered import StepFeatures
from dllm_plugin.sampling.features.token_rules import TokenRules
from dllm_plugin.sampling.filters import Filters
from dllm_plugin.sampling.guidance import pair_requests
from dllm_plugin.sampling.masked_rows import MaskedRows
from dllm_plugin.sampling.proposer import Proposer
from dllm_plugin.sampling.rows import VocabShard
from dllm_plugin.sampling.step import (
    BACKEND,
    COMPILED_AT_MOST,
    Compiled,
    Emitted,
    Step,
)
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases

NOT_STORED = -1  # slot of a position whose KV is not stored


class DiffusionSampler:
    """Replace vLLM's sampler in the model runner."""

    def __init__(
        self,
        sampler: Any,
        states: CanvasStates,
        model_config: ModelConfig,
        size: StepSize,
        compiles: bool = False,
        shard: VocabShard | None = None,
        steps_in_flight: int = 0,
    ) -> None:
        """Make the parts of a step.

        Args:
            size: the size of a full step.
            compiles: compile the step at the first call, which is vLLM's memory profile.
            shard: the columns that the logits have; None for all of them.
            steps_in_flight: how many steps are launched before the result of a step is known.
        """
        config = states.config
        self.states = states
        self.sampling_states = sampler.sampling_states
        self.penalties_state = SimpleNamespace(output_bin_counts=None)
        self.method = config.method
        dtype = model_config.dtype
        vocab_size = model_config.get_vocab_size()
        assert isinstance(dtype, torch.dtype)
        self.rows: MaskedRows | CanvasRows
        if self.method.logits == "masked":
            self.rows = MaskedRows(states, steps_in_flight)
        else:
            width = vocab_size if shard is None else shard.width
            self.rows = CanvasRows(states, dtype, width)
        rules = self.rules = TokenRules(states, vocab_size)
        sampling = self.sampling_states
        filters = Filters(states, sampling, apply_top_k_top_p)
        proposer = Proposer(states, filters, rules, model_config, shard)
        self.proposer = proposer
        self.features = StepFeatures(states, sampler, model_config, self.rows, proposer)
        self.decider = Decider(states, sampling, rules, steps_in_flight > 0)
        self._dirty = True  # whether `sampling_states` has something for the device
        self.compiles = compiles
        self.reserved = False  # whether vLLM's memory profile saw a full step
        self.size = size
        self.num_positions = states.canvas_NC.shape[1]

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Stage a request's sampling parameters."""
        self.sampling_states.add_request(req_idx, sampling_params)
        self._dirty = True
        self.rows.add_request(req_idx, sampling_params)
        reads = self.features.add_request(req_idx, sampling_params)
        self.proposer.add_request(req_idx, reads)

    def remove_request(self, slot: int) -> None:
        """Free a slot."""
        self.features.remove_request(slot)
        self.rows.remove_request(slot)

    def apply_staged_writes(self) -> None:
        """Copy staged parameters to the device; vLLM's runner calls this in every step."""
        if self._dirty:
            self.sampling_states.apply_staged_writes()
            self._dirty = False
        self.features.apply_staged_writes()

    def request_logits(self, batch: InputBatch) -> None:
        """Choose the rows that become logits, before the forward."""
        slots_np = batch.idx_mapping_np[: count_canvases(batch)]
        self.rows.choose(batch, self.proposer.is_mixed(slots_np))

    def trust_block_cache(self, batch: InputBatch, slot_mappings: Tensor) -> None:
        """Store only the KV of the sub-block that a request decodes; called before the forward.

        Fast-dLLM v2 with ``use_block_cache``: once every position of a block has KV, and the first
        token of the sub-block is known, the other sub-blocks' KV stays as it was. They are computed
        nevertheless, since a position costs next to nothing at small batches, but not stored.
        """
        canvases = count_canvases(batch)
        states = self.states
        slots_np = batch.idx_mapping_np[:canvases]
        # Requests of other strategies cannot set the option.
        if not states.requests.uses("use_block_cache", slots_np):
            return
        slots_R = batch.idx_mapping[:canvases]
        count = batch.num_tokens
        stops = batch.query_start_loc[: canvases + 1].to(torch.int64)
        canvas, _ = states.view(slots_R, stops.diff())
        plan = self.rows.plan(canvas, states.mask_id)
        keep_RC = sub_block_to_store(canvas, plan)
        asks_R = states.requests.number("use_block_cache", slots_R) > 0
        drops_R = asks_R & states.cached_N[slots_R]
        drop_RC = drops_R[:, None] & ~keep_RC
        row_T = torch.arange(count, device=stops.device)
        request_T = torch.searchsorted(stops, row_T, right=True) - 1
        inside_T = request_T < canvases
        request_T = request_T.clamp_max(canvases - 1)
        place_T = row_T - stops[request_T]
        place_T = place_T.clamp_max(self.num_positions - 1)
        drop_T = inside_T & drop_RC[request_T, place_T]
        slot_mappings[:, :count].masked_fill_(drop_T, NOT_STORED)

    def __call__(
        self, logits: Tensor, batch: InputBatch, draft_logits: Tensor | None = None
    ) -> SamplerOutput:
        """Run the part of a step that comes after the forward.

        Args:
            logits: ``[T, V]``, the rows that `request_logits` asked for; of a shard its columns.
            batch: the runner's batch; requests with a canvas come first.
        """
        if logits.is_cuda and not self.reserved:
            self.reserved = True
            self._reserve_peak()
            if self.compiles:
                self.compile()
            with compile_ahead():
                self._launch_examples(logits)
            self._launch_examples(logits)  # their first launch loads them
        step = self.rows.read(logits, batch)
        decided = None if step is None else self._denoise(step)
        if decided is None or len(decided.emitted_R) < batch.num_reqs:
            decided = self._for_whole_batch(batch, step, decided)
        slots_np = batch.idx_mapping_np[: batch.num_reqs]
        for feature in self.features.active(slots_np):
            decided = feature.finish_batch(logits, batch, decided)
        rows = decided.logprobs
        logprobs = None if rows is None else LogprobsTensors(*rows)
        return SamplerOutput(
            logprobs_tensors=logprobs,
            num_sampled=decided.emitted_R,
            num_rejected=decided.rejected_R,
            **pack_canvases(decided.tokens_RC),
            **pack_broken(decided.broken_R),
        )

    def _for_whole_batch(
        self,
        batch: InputBatch,
        step: Step | None,
        decided: Emitted | None,
    ) -> Emitted:
        """Move results to the places of their requests in the batch; others emit nothing."""
        count, states = batch.num_reqs, self.states

        def zeros(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(count, *width, dtype=dtype, device=states.device)

        sampled = zeros(torch.int64, self.num_positions)
        num_sampled = zeros(torch.int32)
        num_rejected = zeros(torch.int32)
        results = (sampled, num_sampled, num_rejected, zeros(torch.int32))
        if self.method.full_attention:
            # A forward without a canvas stored nothing that a later one could use.
            num_rejected.copy_(batch.query_start_loc[: count + 1].diff())
        elif states.config.family.absolute_grid:
            # The prompt's partial block is computed again with its rest: canvases begin there.
            slots_R = batch.idx_mapping[:count]
            tail_R = states.tail_N[slots_R]
            ends_R = batch.seq_lens[:count] == states.start_N[slots_R] + tail_R
            num_rejected.copy_(tail_R * ends_R)
        if step is None or decided is None:
            return Emitted(*results, None)
        for result, value in zip(results, decided[:4], strict=True):
            result[step.index_R] = value
        if self.method.full_attention:
            self._mirror(batch, results)
        return Emitted(*results, decided.logprobs)

    def _mirror(self, batch: InputBatch, results: tuple[Tensor, ...]) -> None:
        """Copy the results of conditional requests to their unconditional requests."""
        deciding, guiding = pair_requests(batch.req_ids)
        pairs = np.stack([deciding, guiding])[:, deciding != guiding]
        if not pairs.size:
            return
        source, target = async_tensor_h2d(pairs, device=self.states.device)
        for result in results:
            result[target] = result[source]
        slots_R = batch.idx_mapping
        self.states.copy_rows(slots_R[source], slots_R[target])

    def _reserve_peak(self) -> None:
        """Allocate what a full step takes, for vLLM's memory profile, which runs no canvas."""
        count = reserved_bytes(self.size)
        torch.empty(count, dtype=torch.uint8, device=self.states.device)

    def compile(self, backend: str = BACKEND) -> None:
        """Compile the steps without active features."""
        begin = Compiled(self.rows.begin_step, self.states, backend)
        self.rows.begin = begin
        self.states.apply_staged_writes()
        self.features.apply_staged_writes()
        with torch._dynamo.config.patch(recompile_limit=COMPILED_AT_MOST):
            self.decider.compile(backend, self.rows.example)
        begin.forget()

    def _launch_examples(self, logits: Tensor) -> None:
        """Launch the kernels in all forms, so that no request waits until they are compiled."""
        for part in (self.rows, self.proposer, *self.features.entries):
            part.warm_up(logits, self.rows.carry_NV)

    def _denoise(self, step: Step) -> Emitted:
        """Run one denoising step: propose, unmask, commit, advance."""
        active = self.features.active(step.slots_np)
        for feature in active:
            feature.start_step(step)
        policies = self.decider.policies_of(step.slots_np)
        rows = step.chunks, step.slots_np, step.num_rows
        stats = self.proposer.propose(*rows, active, policies.want_ranking)
        self.rows.keep_carry_rows()
        decided = self.decider.run(step, stats, policies, active)
        self.rows.keep_counts(step, decided.left_R)
        return decided
