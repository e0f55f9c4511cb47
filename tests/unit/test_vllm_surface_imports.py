"""Every symbol of vLLM that we import, in one list."""

import importlib

import pytest
from surface import listed_imports, made_imports

# What the package imports of vLLM; "" is the module itself.
IMPORTS = """
vllm: "" envs LLM ModelRegistry RequestOutput SamplingParams
vllm._custom_ops: apply_repetition_penalties
vllm.config: AttentionConfig CompilationConfig CompilationMode CUDAGraphMode ModelConfig
vllm.config: VllmConfig get_layers_from_vllm_config
vllm.config.cache: CacheDType
vllm.config.model_arch: ModelArchitectureConfig
vllm.config.compilation: CUDAGraphMode
vllm.config.vllm: OptimizationLevel
vllm.config.diffusion: DiffusionConfig
vllm.config.quantization: resolve_quantization_config
vllm.distributed: get_pp_group get_tp_group
vllm.distributed: get_tensor_model_parallel_rank get_tensor_model_parallel_world_size
vllm.distributed: tensor_model_parallel_all_gather tensor_model_parallel_all_reduce
vllm.distributed.parallel_state: get_world_group graph_capture
vllm.engine.arg_utils: EngineArgs
vllm.entrypoints.cli.serve: ServeSubcommand
vllm.entrypoints.launchers.api_server.entry: run_server_worker
vllm.entrypoints.launchers.launcher: setup_server
vllm.entrypoints.llm: ChatCompletionMessageParam
vllm.exceptions: GracefulHTTPError RetryableRequestError VLLMServerError VLLMValidationError
vllm.forward_context: set_forward_context
vllm.inputs: TokensPrompt
vllm.logger: configure_logging_from_args init_logger
vllm.model_executor.layers.attention: Attention
vllm.model_executor.layers.fused_moe.router.router_factory: create_fused_moe_router
vllm.model_executor.layers.fused_moe.routed_experts: RoutedExperts
vllm: _custom_ops
vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel: FP8ScaledMMLinearKernel
vllm.model_executor.layers.linear: LinearBase ReplicatedLinear UnquantizedLinearMethod
vllm.model_executor.layers.quantization.base_config: QuantizeMethodBase
vllm.model_executor.layers.vocab_parallel_embedding: UnquantizedEmbeddingMethod
vllm.model_executor.utils: replace_parameter
vllm.model_executor.layers.logits_processor: LogitsProcessor
vllm.model_executor.layers.quantization.online.base: OnlineQuantizationConfig
vllm.model_executor.layers.quantization.utils.quant_utils: kFp8StaticTensorSym
vllm.model_executor.layers.rotary_embedding: RotaryEmbedding
vllm.model_executor.models.config: MODELS_CONFIG_MAP VerifyAndUpdateConfig
vllm.model_executor.models.bailing_moe: BailingMoE BailingMoeV2ForCausalLM
vllm.model_executor.models.llama: LlamaAttention LlamaForCausalLM
vllm.model_executor.models.mistral: MistralForCausalLM
vllm.model_executor.models.qwen2: Qwen2Attention Qwen2ForCausalLM
vllm.model_executor.models.qwen3: Qwen3ForCausalLM
vllm.model_executor.models.qwen3_moe: Qwen3MoeForCausalLM
vllm.model_executor.models.utils: WeightsMapper
vllm.outputs: CompletionOutput RequestOutput
vllm.platforms: CpuArchEnum current_platform
vllm.plugins: load_general_plugins
vllm.reasoning: ReasoningParserManager
vllm.renderers: ChatParams
vllm.renderers.hf: HfRenderer
vllm.renderers.registry: RENDERER_REGISTRY
vllm.sampling_params: RequestOutputKind SamplingParams StructuredOutputsParams
vllm.tokenizers: cached_tokenizer_from_config
vllm.tokenizers.registry: TokenizerRegistry
vllm.tool_parsers: ToolParserManager
vllm.transformers_utils.config: get_safetensors_params_metadata
vllm.transformers_utils.model_arch_config_convertor: MODEL_ARCH_CONFIG_CONVERTORS
vllm.transformers_utils.model_arch_config_convertor: ModelArchConfigConvertorBase
vllm.triton_utils: HAS_TRITON tl triton
vllm.triton_utils.dispatcher: register_kernels
vllm.usage.usage_lib: UsageContext
vllm.utils.argparse_utils: FlexibleArgumentParser
vllm.utils.cpu_resource_utils: get_memory_node_info get_visible_memory_node
vllm.utils.import_utils: resolve_obj_by_qualname
vllm.utils.import_utils: resolve_obj_by_qualname
vllm.utils.math_utils: cdiv next_power_of_2 round_up
vllm.utils.system_utils: decorate_logs
vllm.version: __version_tuple__
vllm.utils.torch_utils: async_tensor_h2d canonicalize_singleton_dim_strides current_stream
vllm.v1.attention.backend: AttentionBackend AttentionCGSupport AttentionImpl AttentionLayer
vllm.v1.attention.backend: AttentionMetadata AttentionMetadataBuilder AttentionType
vllm.v1.attention.backend: CommonAttentionMetadata MultipleOf
vllm.v1.attention.backends.fa_utils: flash_attn_varlen_func get_flash_attn_version
vllm.v1.attention.backends.fa_utils: is_fa_version_supported
vllm.v1.attention.backends.flash_attn: FlashAttentionBackend FlashAttentionImpl
vllm.v1.attention.backends.flash_attn: FlashAttentionMetadata FlashAttentionMetadataBuilder
vllm.v1.attention.backends.flex_attention: FlexAttentionBackend FlexAttentionMetadataBuilder
vllm.v1.attention.backends.registry: AttentionBackendEnum register_backend
vllm.v1.attention.ops.merge_attn_states: merge_attn_states
vllm.v1.attention.selector: AttentionSelectorConfig
vllm.v1.core.kv_cache_manager: KVCacheManager
vllm.v1.core.kv_cache_utils: BlockHash
vllm.v1.core.sched.async_scheduler: AsyncScheduler
vllm.v1.core.sched.output: GrammarOutput NewRequestData SchedulerOutput
vllm.v1.core.sched.request_queue: SchedulingPolicy
vllm.v1.core.sched.scheduler: Scheduler
vllm.v1.engine: EngineCoreOutput EngineCoreOutputs FinishReason
vllm.v1.kv_cache_interface: is_quantized_kv_cache
vllm.v1.kv_cache_interface: AttentionSpec KVCacheConfig KVCacheLayout KVCacheSpec
vllm.v1.metrics.loggers: AggregateStatLoggerBase
vllm.v1.metrics.stats: IterationStats MultiModalCacheStats
vllm.v1.metrics.stats: RequestSpecDecodeMetrics SchedulerStats
vllm.v1.outputs: AsyncModelRunnerOutput
vllm.v1.outputs: LogprobsLists LogprobsTensors ModelRunnerOutput
vllm.v1.request: Request RequestStatus
vllm.v1.sample.ops.topk_topp_sampler: apply_top_k_top_p
vllm.v1.spec_decode.metrics: SpecDecodingProm SpecDecodingStats
vllm.v1.worker.gpu.async_utils: AsyncOutput
vllm.v1.worker.gpu.attn_utils: FastPrefillHelper build_attn_metadata build_slot_mappings_by_layer
vllm.v1.worker.gpu.cudagraph_utils: BatchExecutionDescriptor ModelCudaGraphManager
vllm.v1.worker.gpu.input_batch: InputBatch set_dummy_context
vllm.v1.worker.gpu.mm.encoder_cache: EncoderCache
vllm.v1.worker.gpu.model_runner: GPUModelRunner
vllm.v1.worker.gpu.model_states.interface: ModelSpecificAttnMetadata ModelState
vllm.v1.worker.gpu.sample.logits_processor: LogitsContext LogitsProcessor
vllm.v1.worker.gpu.sample.output: SamplerOutput
vllm.v1.worker.gpu.states: RequestState
vllm.v1.worker.gpu_worker: Worker
vllm.v1.worker.utils: AttentionGroup
"""
COMPRESSED = (
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
)
IMPORTS += f"{COMPRESSED}: CompressedTensorsConfig\n"


def test_imports_are_listed() -> None:
    assert set(made_imports()) <= listed_imports(IMPORTS), (
        "list what is new, with its signature below"
    )


def test_listed_imports_are_made() -> None:
    assert listed_imports(IMPORTS) <= set(made_imports()), (
        "strike what is no longer used"
    )


# Imported where it is called, since only builds for GPUs have it.
GPU_ONLY = {("vllm.v1.attention.backends.fa_utils", "flash_attn_varlen_func")}


@pytest.mark.parametrize("module,name", sorted(listed_imports(IMPORTS) - GPU_ONLY))
def test_import(module: str, name: str) -> None:
    found = importlib.import_module(module)
    if module == "vllm" and name.startswith(
        "_"
    ):  # a module, which another may have imported
        importlib.import_module(f"{module}.{name}")
    assert not name or hasattr(found, name), f"{name} is gone from {module}"
