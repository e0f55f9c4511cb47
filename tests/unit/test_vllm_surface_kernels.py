"""Kernels of vLLM: those that we replace on the CPU, and what FlashAttention makes of our rows."""

import importlib
import inspect

import pytest
from surface import fields_of, signature_test
from vllm.config.attention import AttentionConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from dllm_plugin.kernels import runner as cpu

# Launched by model runner v2 and replaced on a CPU without Triton.
KERNELS = {
    "buffer_utils._apply_write_kernel": "output_ptr output_stride write_indices_ptr "
    "write_starts_ptr write_contents_ptr write_cu_lens_ptr write_group_ids_ptr BLOCK_SIZE "
    "MULTI_GROUP",
    "block_table._gather_block_tables_kernel": "batch_idx_to_req_idx src_block_table_ptrs "
    "dst_block_table_ptrs block_table_strides num_blocks_ptr num_blocks_stride num_reqs BLOCK_SIZE",
    "block_table._compute_slot_mappings_kernel": "max_num_tokens idx_mapping query_start_loc pos "
    "block_table_ptrs block_table_strides block_sizes slot_mapping_enabled dcp_sharded "
    "slot_mappings_ptr slot_mappings_stride cp_rank CP_SIZE CP_INTERLEAVE PAD_ID TRITON_BLOCK_SIZE",
    "input_batch._prepare_prefill_inputs_kernel": "input_ids_ptr next_prefill_tokens_ptr "
    "next_prefill_tokens_stride num_lookahead idx_mapping_ptr query_start_loc_ptr "
    "all_token_ids_ptr all_token_ids_stride prefill_lens_ptr num_computed_tokens_ptr BLOCK_SIZE "
    "LOOKAHEAD_BLOCK",
    "input_batch._prepare_pos_seq_lens_kernel": "pos_ptr seq_lens_ptr idx_mapping_ptr "
    "query_start_loc_ptr num_computed_tokens_ptr max_num_reqs BLOCK_SIZE",
    "input_batch._combine_sampled_and_draft_tokens_kernel": "input_ids_ptr idx_mapping_ptr "
    "last_sampled_tokens_ptr query_start_loc_ptr seq_lens_ptr prefill_len_ptr draft_tokens_ptr "
    "draft_tokens_stride cu_num_logits_ptr logits_indices_ptr BLOCK_SIZE NUM_NEW_SAMPLED_TOKENS",
    "input_batch._post_update_kernel": "idx_mapping_ptr num_computed_tokens_ptr "
    "last_sampled_tokens_ptr output_bin_counts_ptr output_bin_counts_stride sampled_tokens_ptr "
    "sampled_tokens_stride num_sampled_ptr num_rejected_ptr query_start_loc_ptr all_token_ids_ptr "
    "all_token_ids_stride total_len_ptr",
    "input_batch._expand_idx_mapping_kernel": "idx_mapping_ptr expanded_idx_mapping_ptr "
    "expanded_local_pos_ptr cu_num_logits_ptr BLOCK_SIZE",
    "input_batch._post_update_num_computed_tokens_kernel": "idx_mapping_ptr "
    "num_computed_tokens_ptr query_start_loc_ptr",
    "sample.prompt_logprob._prompt_logprobs_token_ids_kernel": "prompt_logprobs_token_ids_ptr "
    "query_start_loc_ptr idx_mapping_ptr num_computed_tokens_ptr all_token_ids_ptr "
    "all_token_ids_stride BLOCK_SIZE",
    "sample.logprob._topk_log_softmax_kernel": "output_ptr logits_ptr logits_stride topk_ids_ptr "
    "topk_ids_stride topk vocab_size BLOCK_SIZE TOPK_BLOCK_SIZE",
    "sample.logprob._ranks_kernel": "output_ptr logits_ptr logits_stride token_ids_ptr vocab_size "
    "BLOCK_SIZE",
}

FLASH = "v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder."
FLASH_SIGNATURES = {
    FLASH + "__init__": "self kv_cache_spec layer_names vllm_config device",
    FLASH + "build": "self common_prefix_len common_attn_metadata fast_build=False",
    FLASH + "_store_scheduler_metadata": "self scheduler_metadata",
    # What a schedule is made of: the same values here and where attention is computed.
    FLASH
    + "_get_scheduler_metadata": "self * aot_schedule batch_size cu_query_lens max_query_len "
    "seqlens max_seq_len causal max_num_splits",
    "v1.attention.backends.fa_utils:get_flash_attn_version": "requires_alibi=False head_size=None "
    "head_size_v=None has_sinks=False requires_softcap=False kv_cache_block_size=None "
    "supports_fa4_hd256=False",
    "utils.math_utils:round_up": "x y",
    "v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update": "self layer key "
    "value kv_cache slot_mapping",
    "model_executor.layers.rotary_embedding:RotaryEmbedding": "head_size rotary_dim "
    "max_position_embeddings base is_neox_style dtype init_cache=True",
}
FLASH_FIELDS = "aot_schedule max_cudagraph_size max_num_splits scheduler_metadata "
FLASH_FIELDS += "use_full_cuda_graph"


test_flash_attention_signature = signature_test(FLASH_SIGNATURES)


def test_flash_attention_fields() -> None:
    assert set(FLASH_FIELDS.split()) <= fields_of(FlashAttentionMetadataBuilder)
    options = {"backend", "backend_per_kind", "flash_attn_version"}
    assert options | {"flash_attn_max_num_splits_for_cuda_graph"} <= fields_of(
        AttentionConfig
    )


def test_flash_attention_schedules_take_what_they_took() -> None:
    """`schedule_size` gives a row as many entries as vLLM's own buffer does."""
    source = inspect.getsource(FlashAttentionMetadataBuilder.__init__)
    assert "1 + round_up(max_batch_size, 4) * 4," in source


def test_kernels() -> None:
    assert set(cpu.KERNELS) == {f"vllm.v1.worker.gpu.{name}" for name in KERNELS}


@pytest.mark.parametrize("name", list(KERNELS))
def test_kernel_arguments(name: str) -> None:
    module, kernel = name.rsplit(".", 1)
    found = getattr(importlib.import_module(f"vllm.v1.worker.gpu.{module}"), kernel)
    names = getattr(found, "arg_names", None)
    if names is None:  # vLLM's placeholder for Triton keeps the function
        names = inspect.signature(getattr(found, "func", found)).parameters
    assert " ".join(names) == KERNELS[name]


@pytest.mark.skipif(
    not current_platform.is_cpu(), reason="the CPU worker's own preparation"
)
def test_cpu_worker_prepares_buffers() -> None:
    """Our unit tests import what vLLM's CPU worker imports before it builds buffers."""
    shm = importlib.import_module("vllm.v1.worker.cpu.shm")
    buffers = importlib.import_module("vllm.v1.worker.gpu.buffer_utils")
    assert buffers.UvaBuffer is shm.cpu_buffer_utils.UvaBuffer
