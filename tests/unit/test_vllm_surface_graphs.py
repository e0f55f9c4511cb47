"""What we use of vLLM to capture, measure and replay full CUDA graphs, and to count steps."""

from surface import field_test, signature_test
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

GRAPHS = "v1.worker.gpu.cudagraph_utils:"
SIGNATURES = {
    GRAPHS
    + "ModelCudaGraphManager": "vllm_config device cudagraph_mode decode_query_len "
    "lora_capture_cases=None varlen_decode=False ubatch_runner=None",
    GRAPHS + "ModelCudaGraphManager._init_candidates": "self",
    GRAPHS
    + "BatchExecutionDescriptor": "cg_mode num_tokens num_reqs uniform_token_count=None "
    "max_query_len=None num_active_loras=0 num_ubatches=1",
    GRAPHS + "ModelCudaGraphManager.run_fullgraph": "self desc",
    "v1.worker.gpu.attn_utils:build_slot_mappings_by_layer": "slot_mappings kv_cache_config",
    "distributed.parallel_state:graph_capture": "device",
    "forward_context:set_forward_context": "attn_metadata vllm_config num_tokens=None "
    "num_tokens_across_dp=None cudagraph_runtime_mode=<CUDAGraphMode.NONE: 0> "
    "batch_descriptor=None ubatch_slices=None slot_mapping=None skip_compiled=False "
    "is_padding=None",
    "v1.worker.gpu.input_batch:InputBatch.make_dummy": "num_reqs num_tokens input_buffers "
    "max_query_len=None is_padding=True",
    "v1.worker.gpu.input_batch:set_dummy_context": "input_batch block_tables context_len "
    "num_kv_blocks max_model_len input_block_tables=None",
    "v1.worker.gpu.block_table:BlockTables.get_dummy_block_tables": "self num_reqs",
    "v1.worker.gpu.block_table:BlockTables.get_dummy_slot_mappings": "self num_tokens",
    "v1.worker.gpu.attn_utils:FastPrefillHelper": "cudagraph_manager max_num_tokens",
    "config.compilation:CUDAGraphMode.decode_mode": "self",
    "config.compilation:CUDAGraphMode.separate_routine": "self",
}
test_signature = signature_test(SIGNATURES)
FIELDS = {
    LLMEngine: "logger_manager",
    StatLoggerManager: "stat_loggers",
    SchedulerStats: "cudagraph_stats spec_decoding_stats",
    CUDAGraphStat: "num_unpadded_tokens",
    SpecDecodingStats: "num_drafts",
}
test_fields = field_test(FIELDS)
