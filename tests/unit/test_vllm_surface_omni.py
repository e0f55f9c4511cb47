"""Every symbol, signature and field of vLLM that the omni runners rely on, in one list."""

import importlib

import pytest
from surface import (
    fields_of,
    listed_imports,
    made_imports,
    property_test,
    signature_test,
)
from vllm.config import (
    AuxOutputConfig,
    CacheConfig,
    CompilationConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.load import LoadConfig
from vllm.outputs import CompletionOutput, PoolingOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import ExecuteModelState as StateV2
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu.pool.pooling_runner import PoolingRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import ExecuteModelState as StateV1
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
from vllm.v1.worker.gpu_worker import Worker

IMPORTS = """
vllm: ModelRegistry SamplingParams
vllm.config: CUDAGraphMode VllmConfig
vllm.distributed.parallel_state: get_pp_group get_tp_group
vllm.exceptions: VLLMValidationError
vllm.logger: init_logger
vllm.model_executor.layers.pooler: Pooler PoolingParamsUpdate
vllm.model_executor.models.interfaces: supports_eagle3
vllm.platforms: current_platform
vllm.plugins.io_processors.interface: IOProcessor
vllm.sampling_params: RequestOutputKind SamplingParams
vllm.tasks: PoolingTask
vllm.transformers_utils.config: register_config_parser
vllm.transformers_utils.config_parser_base: ConfigParserBase
vllm.v1.attention.backends.utils: get_supported_kv_cache_layouts
vllm.v1.core.sched.async_scheduler: AsyncScheduler
vllm.v1.core.sched.scheduler: Scheduler
vllm.v1.executor.abstract: Executor
vllm.v1.outputs: AsyncModelRunnerOutput EMPTY_MODEL_RUNNER_OUTPUT ModelRunnerOutput
vllm.v1.request: RequestStatus
vllm.v1.sample.logits_processor: LogitsProcessor
vllm.v1.worker.cpu_worker: CPUWorker
vllm.v1.worker.gpu.sample.logits_processor: LogitsProcessor
vllm.v1.worker.gpu_worker: Worker
vllm.v1.worker.worker_base: CompilationTimes
"""

V1 = "v1.worker.gpu_model_runner:GPUModelRunner."
V2 = "v1.worker.gpu.model_runner:GPUModelRunner."
EXECUTOR = "v1.executor.abstract:Executor."
IO = "plugins.io_processors.interface:IOProcessor."
SIGNATURES = {
    V1 + "_update_states": "self scheduler_output",
    V1 + "sample_tokens": "self grammar_output",
    V1
    + "_model_forward": "self input_ids=None positions=None intermediate_tensors=None "
    "inputs_embeds=None **model_kwargs",
    V1 + "_dummy_pooler_run": "self hidden_states",
    V1 + "load_model": "self load_dummy_weights=False * model=None",
    V2 + "add_requests": "self scheduler_output",
    V2 + "_remove_request": "self req_id",
    V2 + "sample_tokens": "self grammar_output",
    V2
    + "prepare_inputs": "self scheduler_output batch_req_state batch_desc num_active_loras",
    V2 + "get_supported_tasks": "self",
    V2 + "get_model": "self",
    "v1.worker.gpu_worker:Worker.init_device": "self",
    "v1.core.sched.scheduler:Scheduler.update_from_output": "self scheduler_output "
    "model_runner_output",
    EXECUTOR + "_init_executor": "self",
    EXECUTOR + "check_health": "self",
    EXECUTOR + "shutdown": "self",
    EXECUTOR + "execute_model": "self scheduler_output non_block=False",
    EXECUTOR
    + "collective_rpc": "self method timeout=None args=() kwargs=None non_block=False",
    EXECUTOR + "sleep": "self level=1",
    EXECUTOR + "wake_up": "self tags=None",
    IO + "parse_data": "self data",
    IO + "pre_process": "self prompt request_id=None **kwargs",
    IO + "post_process": "self model_output request_id=None **kwargs",
    "transformers_utils.config_parser_base:ConfigParserBase.parse": "self model "
    "trust_remote_code revision=None code_revision=None **kwargs",
    "transformers_utils.config:register_config_parser": "config_format",
    "v1.sample.logits_processor:LogitsProcessor.validate_params": "sampling_params",
    "v1.worker.gpu.sample.logits_processor:LogitsProcessor.validate_params": "sampling_params",
    "model_executor.models.interfaces:supports_eagle3": "model",
    "model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers": "self layers",
    "model_executor.layers.pooler:Pooler.get_supported_tasks": "self",
    "model_executor.layers.pooler:Pooler.get_pooling_updates": "self task",
    "v1.attention.backends.utils:get_supported_kv_cache_layouts": "backends",
}
FIELDS: dict[type, str] = {
    RunnerV1: "execute_model_state input_batch query_start_loc requests vllm_config model "
    "use_aux_hidden_state_outputs",
    RunnerV2: "execute_model_state model pooling_runner use_aux_hidden_state_outputs vllm_config",
    StateV1: "scheduler_output hidden_states aux_hidden_states",
    StateV2: "input_batch hidden_states aux_hidden_states",
    InputBatch: "req_ids num_reqs query_start_loc_np num_scheduled_tokens idx_mapping_np "
    "num_draft_tokens_per_req",
    CachedRequestState: "req_id sampling_params pooling_params num_computed_tokens "
    "num_prompt_tokens",
    PoolingRunner: "pooling_params supported_tasks",
    Worker: "model_runner use_v2_model_runner",
    NewRequestData: "req_id prompt_token_ids prefill_token_ids sampling_params num_computed_tokens",
    CachedRequestData: "req_ids resumed_req_ids num_output_tokens",
    SchedulerOutput: "finished_req_ids scheduled_new_reqs scheduled_cached_reqs "
    "num_scheduled_tokens scheduled_spec_decode_tokens",
    ModelRunnerOutput: "req_ids req_id_to_index sampled_token_ids pooler_output",
    EngineCoreOutput: "request_id new_token_ids routed_experts",
    CompletionOutput: "routed_experts token_ids",
    PoolingOutput: "data",
    PoolingParams: "extra_kwargs task",
    SamplingParams: "extra_args output_kind skip_reading_prefix_cache",
    Request: "num_computed_tokens status",
    Executor: "vllm_config model_config cache_config load_config lora_config parallel_config "
    "scheduler_config device_config speculative_config",
    VllmConfig: "additional_config aux_output_config cache_config compilation_config "
    "kv_transfer_config model_config parallel_config scheduler_config speculative_config",
    ModelConfig: "dtype logits_processors model quantization revision runner_type "
    "trust_remote_code",
    ParallelConfig: "data_parallel_index distributed_executor_backend pipeline_parallel_size "
    "prefill_context_parallel_size world_size",
    SchedulerConfig: "async_scheduling max_num_seqs scheduler_cls",
    CacheConfig: "kv_sharing_fast_prefill",
    CompilationConfig: "cudagraph_mode",
    AuxOutputConfig: "enable_return_routed_experts",
    KVTransferConfig: "kv_load_failure_policy",
    LoadConfig: "download_dir load_format",
}
PROPERTIES = {
    NewRequestData: "prompt_len",
    Request: "num_tokens",
    ModelConfig: "is_diffusion get_total_num_hidden_layers",
    SchedulerConfig: "get_scheduler_cls",
    VllmConfig: "use_v2_model_runner",
}


def test_imports_are_those_listed() -> None:
    assert set(made_imports("omni")) == listed_imports(IMPORTS)


@pytest.mark.parametrize("module,name", sorted(listed_imports(IMPORTS)))
def test_import(module: str, name: str) -> None:
    if module != "vllm.v1.worker.cpu_worker":  # replaces parts of torch.cuda
        assert hasattr(importlib.import_module(module), name)


test_signature = signature_test(SIGNATURES)


@pytest.mark.parametrize("owner", list(FIELDS), ids=lambda owner: owner.__qualname__)
def test_fields(owner: type) -> None:
    known = set().union(
        *(fields_of(base) for base in owner.__mro__ if "vllm" in base.__module__)
    )
    assert set(FIELDS[owner].split()) - known == set()


test_properties = property_test(PROPERTIES)
