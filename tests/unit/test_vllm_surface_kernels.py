"""The runner kernels of vLLM that we replace on the CPU, and their arguments."""

import importlib
import inspect

import pytest
from vllm.platforms import current_platform

from dllm_plugin.kernels import cpu

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
}


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


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU worker's own preparation")
def test_cpu_worker_prepares_buffers() -> None:
    """Our unit tests import what vLLM's CPU worker imports before it builds buffers."""
    shm = importlib.import_module("vllm.v1.worker.cpu.shm")
    buffers = importlib.import_module("vllm.v1.worker.gpu.buffer_utils")
    assert buffers.UvaBuffer is shm.cpu_buffer_utils.UvaBuffer
