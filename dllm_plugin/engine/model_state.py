"""Connect vLLM's model runner with state, attention and sampling. Glue only."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from dllm_plugin.attention.backends import flash_version
from dllm_plugin.attention.cascade import cascade_from
from dllm_plugin.attention.kv_groups import KVGroups, clear_pages
from dllm_plugin.attention.sequences import AttentionSequences
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.memory import step_size
from dllm_plugin.config.worker_carriers import FINISHED, unpack_id
from dllm_plugin.kernels import runner
from dllm_plugin.models.checkpoints.quantised import check_activation_scales
from dllm_plugin.sampling.rows import VocabShard
from dllm_plugin.state.canvas_states import (
    CanvasStates,
    count_canvases,
    with_spare_row,
)
from dllm_plugin.state.refreshed import write_committed, write_reordered, write_tails

from .sampler import DiffusionSampler


class DiffusionModelState(ModelState):
    """Prepare attention metadata before the forward and replace the sampler after it."""

    num_new_sampled_tokens_per_step = 0

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        runner.install()
        check_activation_scales(model)
        self.config = get_decode_config(vllm_config)
        self.states: CanvasStates
        self.sequences: AttentionSequences
        self.req_states: RequestState
        self.sampler: DiffusionSampler | None = None  # on the last stage only

    def get_supported_generation_tasks(self) -> tuple[Any, ...]:
        """Return that we generate text, and nothing else."""
        return ("generate",)

    def place_canvases(self, req_states: RequestState) -> None:
        """Make the canvases in the runner's draft tokens.

        Stages of a pipeline before the last have no sampler: vLLM sends them the draft tokens of
        the last stage.
        """
        self.req_states = req_states
        draft_tokens = with_spare_row(req_states.draft_tokens)
        req_states.draft_tokens = draft_tokens
        self.states = CanvasStates(self.config, self.model_config, draft_tokens)
        fewest = cascade_from(self.vllm_config, flash_version(self.vllm_config))
        limits = (self.max_num_reqs, self.max_num_tokens)
        self.sequences = AttentionSequences(self.states, *limits, fewest)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Return our sampler, on the state of vLLM's."""
        self.place_canvases(sampler.req_states)
        shard = None
        if self.config.vocab_parallel:
            head: Any = self.model.lm_head
            width = head.num_embeddings_per_partition
            shard = VocabShard(width, self.model_config.get_vocab_size())
        self.sampler = DiffusionSampler(
            sampler,
            self.states,
            self.model_config,
            step_size(self.vllm_config, self.config),
            self.config.compile_step,
            shard,
            self.vllm_config.max_concurrent_batches - 1,
        )
        return self.sampler, None

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Start a slot; what is given after its canvas stands with its tokens, by position."""
        self.states.add_request(req_index, new_req_data)
        templates = self.states.templates
        if req_index in templates.tails:
            start = int(templates.tail_start_np[req_index])
            tail = templates.tails[req_index]
            self.req_states.all_token_ids.stage_write(req_index, start, tail)
        self.sequences.forget()

    def remove_request(self, req_id: str) -> None:
        """Free a slot, after a request's end or its preemption."""
        why, pages = unpack_id(req_id)
        if why == FINISHED and pages:
            clear_pages(self.vllm_config, pages, self.device)
        slot = self.states.remove_request(req_id)
        if slot is not None and self.sampler is not None:
            self.sampler.remove_request(slot)

    def apply_staged_writes(self) -> None:
        """Copy staged slot starts to the device."""
        self.states.apply_staged_writes()

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> Tensor | None:
        """Return None: token ids are the input."""
        return None

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, Any]:
        """Return nothing: the runner's own inputs serve, but for refreshes and long suffixes."""
        slots_np = input_batch.idx_mapping_np
        all_token_ids = req_states.all_token_ids
        if not self.states.requests.refresh_all(slots_np):
            write_committed(input_batch, all_token_ids.gpu)
        if self.config.method.reorders:
            write_reordered(input_batch, self.states)
        if self.states.templates.tails:
            starts = self.states.templates.tail_start_np[slots_np]
            write_tails(input_batch, all_token_ids.gpu, starts)
        return {}

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Return nothing, as `prepare_inputs`, for warm-up and graph capture."""
        return {}

    def _mark_drafts(self, batch: InputBatch) -> None:
        """Write which rows of this forward draft: those of blocks with masks."""
        rows_T1: Any = self.model.draft_rows
        canvases = count_canvases(batch)
        rows_T1.zero_()
        stores_R = self.sequences.stores_R
        if not canvases or stores_R is None:
            return
        lengths_R = batch.query_start_loc[: canvases + 1].diff()
        count = int(batch.query_start_loc_np[canvases])
        rows_T = (~stores_R).repeat_interleave(lengths_R, output_size=count)
        rows_T1[:count, 0] = rows_T.to(rows_T1.dtype)

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        """Build attention metadata from the segments of a step."""
        if self.sampler is not None:
            self.sampler.request_logits(input_batch)
            self.sampler.trust_block_cache(input_batch, slot_mappings)
        elif self.config.method.causal:
            # The last stage writes where canvases start as it commits tokens.
            canvases = count_canvases(input_batch)
            lengths_R = input_batch.query_start_loc[: canvases + 1].diff()
            starts_R = (input_batch.seq_lens[:canvases] - lengths_R).to(torch.int64)
            self.states.start_N[input_batch.idx_mapping[:canvases]] = starts_R
        groups = KVGroups(
            self.states.max_model_len,
            input_batch.positions,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
        )
        metadata = self.sequences.build(
            input_batch, groups, cudagraph_mode, for_capture
        )
        if self.config.draft_adapter is not None:
            self._mark_drafts(input_batch)
        return metadata
