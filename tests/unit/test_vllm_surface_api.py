"""Every symbol, signature and field of vLLM's server that we rely on, in one list."""

from surface import fields_of, import_test, listed_imports, made_imports, signature_test
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.plugins import ENDPOINT_PLUGINS_GROUP
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin as Interface

from dllm_plugin.api.images import ImagesPlugin
from dllm_plugin.api.plugin import EndpointPlugin

IMPORTS = """
vllm.engine.protocol: EngineClient
vllm.exceptions: VLLMValidationError
vllm.entrypoints.openai.chat_completion: api_router
vllm.entrypoints.openai.chat_completion.protocol: ChatCompletionRequest
vllm.entrypoints.openai.completion: api_router
vllm.entrypoints.openai.completion.protocol: CompletionRequest CompletionResponse
vllm.entrypoints.openai.completion.protocol: CompletionResponseChoice
vllm.entrypoints.pooling.pooling: api_router
vllm.entrypoints.serve.engine.protocol: ErrorResponse
vllm.entrypoints.serve.exception_handling.error_response: create_error_response
vllm.entrypoints.serve.utils.api_utils: should_include_usage
vllm.entrypoints.serve.utils.api_utils: load_aware_call validate_json_request with_cancellation
vllm.entrypoints.serve.utils.orca_metrics: metrics_header
vllm.entrypoints.serve.utils.sse_keep_alive: with_sse_keep_alive
vllm.outputs: CompletionOutput RequestOutput
vllm.sampling_params: RequestOutputKind SamplingParams StructuredOutputsParams
vllm.tracing: SpanAttributes SpanKind extract_trace_context instrument_manual
vllm.utils: random_uuid
"""
OPENAI = "entrypoints.openai."
UTILS = "entrypoints.serve.utils."
SIGNATURES: dict[str, str] = {
    OPENAI + "chat_completion.api_router:create_chat_completion": "request raw_request",
    OPENAI + "completion.api_router:create_completion": "request raw_request",
    OPENAI
    + "chat_completion.serving:OpenAIServingChat.create_chat_completion": "self request "
    "raw_request=None",
    OPENAI
    + "completion.serving:OpenAIServingCompletion.create_completion": "self request "
    "raw_request=None",
    UTILS + "sse_keep_alive:with_sse_keep_alive": "generator interval",
    UTILS
    + "api_utils:should_include_usage": "stream_options enable_force_include_usage",
    UTILS + "orca_metrics:metrics_header": "metrics_format",
    OPENAI
    + "chat_completion.serving:OpenAIServingChat.render_chat_request": "self request",
    "entrypoints.serve.exception_handling.error_response:create_error_response": "message "
    "err_type='BadRequestError' status_code=<HTTPStatus.BAD_REQUEST: 400> param=None",
    "entrypoints.serve.engine.serving:BaseServing.create_error_response": "message "
    "err_type='BadRequestError' status_code=<HTTPStatus.BAD_REQUEST: 400> param=None",
    "engine.protocol:EngineClient.generate": "self prompt sampling_params request_id * "
    "prompt_text=None lora_request=None tokenization_kwargs=None trace_headers=None priority=0 "
    "data_parallel_rank=None session_id=None kv_hints=None reasoning_ended=None "
    "reasoning_parser_kwargs=None",
    "engine.protocol:EngineClient.is_tracing_enabled": "self",
    "tracing:instrument_manual": "span_name start_time end_time=None attributes=None context=None "
    "kind=None",
    "tracing:extract_trace_context": "headers",
    # How a server ends.
    "renderers.hf:HfRenderer.shutdown": "self",
    "v1.engine.async_llm:AsyncLLM.shutdown": "self timeout=None",
    "v1.engine.output_processor:OutputProcessor.propagate_error": "self e",
    "v1.engine.output_processor:OutputProcessor.process_outputs": "self engine_core_outputs "
    "engine_core_timestamp=None iteration_stats=None weight_version=None",
    "v1.engine.output_processor:RequestOutputCollector.put": "self output",
    "renderers.base:BaseRenderer.tokenize_prompt_async": "self prompt params",
    "renderers.base:BaseRenderer.get_bos_token_id": "self",
    "renderers.base:BaseRenderer.get_eos_token_id": "self",
    "plugins.endpoint_plugins.interface:EndpointPlugin.attach_router": "self app",
    "plugins.endpoint_plugins.interface:EndpointPlugin.init_state": "self engine_client state args",
}


def test_imports_are_listed() -> None:
    assert set(made_imports("api")) == listed_imports(IMPORTS)


test_import = import_test(IMPORTS)
test_signature = signature_test(SIGNATURES)


def test_the_plugin_is_one() -> None:
    assert ENDPOINT_PLUGINS_GROUP == "vllm.endpoint_plugins"
    assert isinstance(EndpointPlugin(), Interface) and isinstance(
        ImagesPlugin(), Interface
    )


def test_fields() -> None:
    for body in (ChatCompletionRequest, CompletionRequest):
        fields = {"vllm_xargs", "max_tokens", "stream", "n", "structured_outputs"}
        assert fields | {"response_format"} <= set(body.model_fields)
        assert body.model_config["extra"] == "allow"
    completions = {"prompt", "suffix", "echo", "return_token_ids", "logprobs", "seed"}
    assert completions <= set(CompletionRequest.model_fields)
    output = {"prompt_token_ids", "outputs", "kv_transfer_params"}
    assert output <= fields_of(RequestOutput)
    completion = {
        "index",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "spec_decode_metrics",
    }
    assert completion | {"routed_experts"} <= fields_of(CompletionOutput)


def test_a_handler_finds_its_engine_by_this_name() -> None:
    """A copy of it with another engine client then asks that one alone."""
    for handler in (OpenAIServingChat, OpenAIServingCompletion):
        assert "engine_client" in fields_of(handler.__mro__[1])
