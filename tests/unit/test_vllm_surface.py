"""Every symbol, signature and field of vLLM that we rely on, in one list.

An upgrade fails here first. Signatures are argument names with defaults, without annotations.
"""

import dataclasses

from surface import field_test, property_test, signature_test
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.bailing_moe import BailingMoeForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu_worker import Worker

# Overridden or called: module (under vllm) : callable -> arguments.
STATE = "v1.worker.gpu.model_states.interface:ModelState."
SAMPLER = "v1.worker.gpu.sample.sampler:Sampler."
SAMPLING = "v1.worker.gpu.sample.states:SamplingStates."
SCHEDULER = "v1.core.sched.async_scheduler:AsyncScheduler."
PROCESSOR = "v1.worker.gpu.sample.logits_processor:LogitsProcessor."
LOGGER = "v1.metrics.loggers:AggregateStatLoggerBase."
METRICS, BACKEND = "v1.spec_decode.metrics:SpecDecoding", "v1.attention.backend:"
REGISTRY, MODELS = "v1.attention.backends.registry:", "model_executor.models."
RUNNER = "v1.worker.gpu.model_runner:GPUModelRunner"
SIGNATURES = {
    RUNNER: "vllm_config device",
    RUNNER + ".add_requests": "self scheduler_output",
    RUNNER + ".capture_model": "self * profile_only=False",
    RUNNER + ".finish_requests": "self scheduler_output",
    RUNNER + ".initialize_kv_cache": "self kv_cache_config is_profiling=False "
    "kv_cache_allocation_context=None",
    "v1.worker.gpu_worker:Worker._make_model_runner": "self",
    "v1.worker.gpu_worker:Worker.load_model": "self * load_dummy_weights=False",
    STATE + "__init__": "self vllm_config model encoder_cache device",
    STATE + "get_supported_generation_tasks": "self",
    STATE + "custom_sampler": "self sampler",
    STATE + "add_request": "self req_index new_req_data",
    STATE + "remove_request": "self req_id",
    STATE + "apply_staged_writes": "self",
    STATE
    + "prepare_inputs_embeds": "self scheduled_encoder_inputs input_batch req_states",
    STATE + "prepare_inputs": "self input_batch req_states",
    STATE + "prepare_dummy_inputs": "self num_reqs num_tokens",
    STATE
    + "prepare_attn": "self input_batch cudagraph_mode block_tables slot_mappings "
    "attn_groups kv_cache_config for_capture=False ubatch_idx=0",
    # What our sampler stands in for.
    SAMPLER + "add_request": "self req_idx sampling_params",
    SAMPLER + "apply_staged_writes": "self",
    SAMPLER + "__call__": "self logits input_batch",
    SAMPLING + "add_request": "self req_idx sampling_params",
    SAMPLING + "apply_staged_writes": "self",
    "v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": "logits k p",
    "_custom_ops:apply_repetition_penalties": "logits prompt_mask output_mask "
    "repetition_penalties",
    "v1.worker.gpu.attn_utils:build_attn_metadata": "attn_groups num_reqs num_tokens "
    "query_start_loc_gpu query_start_loc_cpu max_query_len seq_lens max_seq_len block_tables "
    "slot_mappings kv_cache_config seq_lens_cpu_upper_bound=None dcp_local_seq_lens=None "
    "dcp_local_seq_lens_cpu_upper_bound=None positions=None is_prefilling=None "
    "mm_req_doc_ranges=None model_specific_attn_metadata=None for_cudagraph_capture=False "
    "causal=True rswa_prefix_lens=None ubatch_idx=0 fast_prefill=None req_idx=None",
    "v1.worker.gpu.model_states.interface:ModelSpecificAttnMetadata.get_extra_attn_kwargs": "self "
    "attn_metadata_builder num_reqs",
    "v1.attention.backends.flash_attn:FlashAttentionImpl.forward": "self layer query key value "
    "kv_cache attn_metadata output output_scale=None output_block_scale=None",
    "v1.attention.ops.merge_attn_states:merge_attn_states": "output prefix_output prefix_lse "
    "suffix_output suffix_lse output_lse=None prefill_tokens_with_context=None output_scale=None",
    REGISTRY + "register_backend": "backend class_path=None is_mamba=False",
    REGISTRY + "AttentionBackendEnum.get_path": "self include_classname=True",
    REGISTRY + "AttentionBackendEnum.is_overridden": "self",
    REGISTRY + "AttentionBackendEnum.clear_override": "self",
    BACKEND
    + "AttentionMetadataBuilder.__init__": "self kv_cache_spec layer_names vllm_config "
    "device",
    BACKEND
    + "AttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata "
    "fast_build=False",
    "v1.attention.backends.flex_attention:FlexAttentionMetadataBuilder.__init__": "self "
    "kv_cache_spec layer_names vllm_config device",
    "v1.kv_cache_interface:is_quantized_kv_cache": "kv_cache_dtype",
    BACKEND
    + "AttentionImpl.__init__": "self num_heads head_size scale num_kv_heads=None "
    "alibi_slopes=None sliding_window=None kv_cache_dtype='auto' logits_soft_cap=None "
    "attn_type=<AttentionType.DECODER: 'decoder'> kv_sharing_target_layer_name=None",
    BACKEND
    + "AttentionImpl.forward": "self layer query key value kv_cache attn_metadata output "
    "output_scale=None output_block_scale=None",
    BACKEND + "AttentionBackend.get_supported_kernel_block_sizes": "kv_cache_spec=None",
    BACKEND + "AttentionBackend.get_preferred_block_size": "default_block_size",
    BACKEND + "AttentionBackend.get_supported_head_sizes": "",
    BACKEND + "AttentionBackend.supported_kv_cache_layouts": "",
    BACKEND + "AttentionBackend.supports_non_causal": "",
    "platforms.interface:Platform.get_attn_backend_cls": "selected_backend attn_selector_config "
    "num_heads=None",
    "v1.worker.utils:AttentionGroup.build_metadata": "self common_attn_metadata ubatch_idx=0 "
    "common_prefix_len=0 **kwargs",
    "utils.torch_utils:async_tensor_h2d": "data device=None dtype=None out=None",
    "utils.math_utils:next_power_of_2": "n",
    SCHEDULER + "__init__": "self *args **kwargs",
    SCHEDULER + "add_request": "self request",
    SCHEDULER + "_update_after_schedule": "self scheduler_output",
    SCHEDULER + "get_request_counts": "self",
    SCHEDULER + "schedule": "self throttle_prefills=False",
    SCHEDULER + "update_from_output": "self scheduler_output model_runner_output",
    SCHEDULER
    + "_update_request_with_output": "self request new_token_ids is_stale=False",
    SCHEDULER + "make_spec_decoding_stats": "self spec_decoding_stats num_draft_tokens "
    "num_accepted_tokens num_invalid_spec_tokens request_id",
    SCHEDULER + "finish_requests": "self request_ids finished_status",
    SCHEDULER + "_free_request": "self request delay_free_blocks=False",
    SCHEDULER + "_preempt_request": "self request timestamp drop_stale_output=False",
    SCHEDULER
    + "_reserve_prefill_lookahead": "self request num_computed_tokens num_new_tokens",
    "utils.math_utils:cdiv": "a b",
    "engine.arg_utils:EngineArgs.get_batch_defaults": "world_size",
    PROCESSOR + "validate_params": "sampling_params",
    PROCESSOR + "apply": "self logits ctx",
    LOGGER + "__init__": "self vllm_config engine_indexes",
    LOGGER
    + "record": "self scheduler_stats iteration_stats mm_cache_stats=None engine_idx=0",
    LOGGER + "log": "self",
    LOGGER + "log_engine_initialized": "self",
    METRICS
    + "Prom": "speculative_config labelnames per_engine_labelvalues is_diffusion=False",
    METRICS + "Prom.observe": "self spec_decoding_stats engine_idx=0",
    "v1.metrics.stats:RequestSpecDecodeMetrics.observe": "self num_draft_tokens num_accepted "
    "detailed=False",
    SCHEDULER + "make_stats": "self spec_decoding_stats=None kv_connector_stats=None "
    "cudagraph_stats=None perf_stats=None ec_connector_stats=None",
    "renderers.hf:HfRenderer.validate_token_ids": "self token_ids * parameter=None",
    "renderers:BaseRenderer.render_chat": "self conversations chat_params tok_params=None * "
    "prompt_extras=None skip_mm_cache=False",
    "renderers:BaseRenderer.render_cmpl": "self prompts tok_params=None * "
    "prompt_extras=None skip_mm_cache=False",
    "renderers.registry:RENDERER_REGISTRY.register": "renderer_mode module class_name",
    "tokenizers.registry:TokenizerRegistry.register": "tokenizer_mode module class_name",
    "tokenizers:cached_tokenizer_from_config": "model_config **kwargs",
    "triton_utils.dispatcher:register_kernels": "overrides",
    "config:VllmConfig._validate_v2_model_runner": "self",
    "config:VllmConfig._get_v2_model_runner_unsupported_features": "self",
    "config:ModelConfig.get_vocab_size": "self",
    "distributed:get_tensor_model_parallel_rank": "",
    "distributed:get_tensor_model_parallel_world_size": "",
    "distributed:tensor_model_parallel_all_gather": "input_ dim=-1",
    "model_executor.layers.logits_processor:LogitsProcessor.forward": "self lm_head hidden_states "
    "embedding_bias=None skip_gather=False",
    MODELS + "config:VerifyAndUpdateConfig.verify_and_update_config": "vllm_config",
    MODELS
    + "config:VerifyAndUpdateConfig.verify_and_update_model_config": "model_config",
    "transformers_utils.model_arch_config_convertor:ModelArchConfigConvertorBase.convert": "self "
    "supports_multimodal=True",
    MODELS + "llama:LlamaForCausalLM.load_weights": "self weights",
    MODELS + "llama:LlamaForCausalLM.compute_logits": "self hidden_states",
    MODELS + "qwen2:Qwen2ForCausalLM": "* vllm_config prefix=''",
    MODELS + "qwen2:Qwen2ForCausalLM.load_weights": "self weights",
    MODELS + "qwen2:Qwen2ForCausalLM.compute_logits": "self hidden_states",
    MODELS + "qwen3:Qwen3ForCausalLM": "* vllm_config prefix=''",
    MODELS + "qwen3:Qwen3ForCausalLM.load_weights": "self weights",
    MODELS + "qwen3:Qwen3ForCausalLM.compute_logits": "self hidden_states",
    MODELS + "qwen3_moe:Qwen3MoeForCausalLM": "* vllm_config prefix=''",
    MODELS + "qwen3_moe:Qwen3MoeForCausalLM.load_weights": "self weights",
    MODELS + "qwen3_moe:Qwen3MoeForCausalLM.compute_logits": "self hidden_states",
    MODELS + "bailing_moe:BailingMoeV2ForCausalLM": "* vllm_config prefix=''",
    MODELS + "bailing_moe:BailingMoeV2ForCausalLM.load_weights": "self weights",
    MODELS + "bailing_moe:BailingMoeV2ForCausalLM.compute_logits": "self hidden_states",
    MODELS + "bailing_moe:BailingMoE.forward": "self hidden_states",
    MODELS + "utils:WeightsMapper.apply": "self weights",
    "model_executor.models:ModelRegistry.register_model": "model_arch model_cls",
    "model_executor.models:ModelRegistry.get_supported_archs": "",
    "model_executor.models:ModelRegistry.inspect_model_cls": "architectures model_config",
    "entrypoints.cli.serve:ServeSubcommand.subparser_init": "self subparsers",
    "entrypoints.cli.serve:ServeSubcommand.validate": "self args",
    "entrypoints.cli.serve:ServeSubcommand.cmd": "args",
    "entrypoints.launchers.launcher:setup_server": "args * reuse_port",
    "entrypoints.launchers.api_server.entry:run_server_worker": (
        "listen_address sock args client_config=None **uvicorn_kwargs"
    ),
    "model_executor.layers.fused_moe.routed_experts:RoutedExperts.forward_modular": (
        "self x topk_weights topk_ids shared_experts=None shared_experts_input=None"
    ),
    "model_executor.layers.fused_moe.routed_experts:RoutedExperts.forward_monolithic": (
        "self x router_logits=None input_ids=None"
    ),
    "v1.engine.core_client:AsyncMPClient.call_utility_all_async": "self method *args",
    "logger:configure_logging_from_args": "args",
    "reasoning:ReasoningParserManager.list_registered": "",
    "tool_parsers:ToolParserManager.list_registered": "",
    "exceptions:GracefulHTTPError": "message http_status",
    "exceptions:RetryableRequestError": "message='Request failed; please retry'",
    "exceptions:VLLMValidationError": "message * parameter=None value=None",
}

# Read or set, per class: fields of a dataclass or attributes that its source assigns.
FIELDS: dict[type, str] = {
    CudaGraphManager: "vllm_config compilation_config cudagraph_mode decode_query_len "
    "lora_capture_cases max_num_reqs ubatch_runner varlen_decode _candidates _capture_descs",
    GPUModelRunner: "cudagraph_manager device fast_prefill lora_capture_cases max_num_tokens "
    "is_last_pp_rank model_state req_states use_pp vllm_config",
    Worker: "model_runner use_v2_model_runner",
    SamplerOutput: "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected",
    LogprobsTensors: "logprob_token_ids logprobs selected_token_ranks cu_num_generated_tokens",
    InputBatch: "num_reqs num_reqs_after_padding idx_mapping idx_mapping_np expanded_idx_mapping "
    "expanded_local_pos num_tokens num_tokens_after_padding num_draft_tokens "
    "num_draft_tokens_per_req query_start_loc query_start_loc_np seq_lens num_computed_tokens_np "
    "is_prefilling_np logits_indices cu_num_logits input_ids max_query_len",
    CommonAttentionMetadata: "query_start_loc block_table_tensor max_query_len",
    NewRequestData: "req_id prompt_token_ids prefill_token_ids sampling_params num_computed_tokens",
    SchedulerOutput: "num_scheduled_tokens scheduled_new_reqs scheduled_spec_decode_tokens "
    "total_num_scheduled_tokens finished_req_ids preempted_req_ids",
    ModelRunnerOutput: "req_id_to_index sampled_token_ids prompt_logprobs_dict",
    EngineCoreOutputs: "outputs",
    EngineCoreOutput: "request_id new_token_ids new_logprobs kv_transfer_params prefill_stats "
    "new_prompt_logprobs_tensors finish_reason events trace_headers spec_decode_metrics "
    "routed_experts",
    LogprobsLists: "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens",
    KVCacheManager: "block_pool enable_caching watermark_blocks",
    SchedulerStats: "num_running_reqs num_waiting_reqs spec_decoding_stats",
    RequestSpecDecodeMetrics: "num_spec_tokens histogram num_draft_tokens per_step_accepted "
    "per_step_drafted",
    SpecDecodingStats: "num_spec_tokens num_drafts num_draft_tokens num_accepted_tokens "
    "num_draft_tokens_per_pos",
    ModelState: "model model_config max_num_reqs max_num_tokens",
    RequestState: "all_token_ids draft_tokens max_seq_len req_id_to_index",
    Sampler: "req_states sampling_states",
    SamplingStates: "temperature top_k top_p min_p seeds",
    Request: "num_computed_tokens next_decode_eligible_step spec_decode_metrics sampling_params "
    "arrival_time client_index lora_request max_tokens num_prompt_tokens priority request_id "
    "spec_token_ids status prompt_token_ids resumable block_hashes cache_salt "
    "num_output_placeholders",
    Scheduler: "num_sampled_tokens_per_step num_spec_tokens max_num_scheduled_tokens requests "
    "max_num_active_reqs max_model_len scheduler_config vllm_config current_step running waiting "
    "block_size connector grammar_compile_error_reqs kv_cache_manager",
    AsyncScheduler: "_spec_token_placeholders pp_size",
    VllmConfig: "additional_config attention_config cache_config compilation_config "
    "diffusion_config kv_transfer_config load_config lora_config model_config "
    "optimization_level parallel_config scheduler_config speculative_config watermark_config",
    ModelConfig: "dtype enable_prompt_embeds enable_trace_replay enforce_eager hf_config "
    "logits_processors logprobs_mode max_logprobs max_model_len model return_sampling_mask "
    "revision runner_type served_model_name tokenizer_mode",
    SchedulerConfig: "async_scheduling enable_chunked_prefill long_prefill_token_threshold "
    "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs scheduler_cls watermark",
    CacheConfig: "block_size cache_dtype enable_prefix_caching kv_offloading_backend "
    "kv_offloading_size num_gpu_blocks user_specified_block_size",
    CompilationConfig: "cudagraph_capture_sizes cudagraph_mode max_cudagraph_capture_size",
    ParallelConfig: "decode_context_parallel_size enable_batch_sharded_sampling enable_dbo "
    "enable_ep_weight_filter enable_expert_parallel data_parallel_size data_parallel_size_local "
    "pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size worker_cls "
    "world_size",
    SamplingParams: "extra_args logit_bias allowed_token_ids logprobs max_tokens min_tokens "
    "stop stop_token_ids temperature top_p top_k min_p seed ignore_eos bad_words n _eos_token_id",
}
# What gives the columns of the logits that a rank computes.
FIELDS |= {
    owner: "lm_head logits_processor"
    for owner in (
        *(BailingMoeForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM),
        *(Qwen3ForCausalLM, Qwen3MoeForCausalLM),
    )
}
FIELDS[VocabParallelEmbedding] = "num_embeddings_per_partition"
FIELDS[LinearBase] = "input_size output_size"
FIELDS[RoutedExperts] = (
    "global_num_experts hidden_size intermediate_size_per_partition local_num_experts "
    "quant_method top_k"
)
PROPERTIES = {
    ModelConfig: "architecture get_head_size get_sliding_window get_vocab_size use_mla",
    ParallelConfig: "local_engines_only",
    Request: "num_tokens num_tokens_with_spec",
    VllmConfig: "use_v2_model_runner",
    SamplingParams: "eos_token_id bad_words_token_ids",
    ModelState: "max_model_len num_new_sampled_tokens_per_step",
}
test_signature = signature_test(SIGNATURES)
test_fields = field_test(FIELDS)
test_properties = property_test(PROPERTIES)


def test_sampler_output_takes_what_we_give() -> None:
    """Further fields must have defaults."""
    required = [
        f.name
        for f in dataclasses.fields(SamplerOutput)
        if f.default is f.default_factory
    ]
    assert required == FIELDS[SamplerOutput].split()
