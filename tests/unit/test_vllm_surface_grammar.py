"""Every symbol of vLLM, xgrammar and llguidance that grammars on canvases rely on."""

import llguidance
import xgrammar
from surface import (
    GRAMMARS,
    field_test,
    import_test,
    listed_imports,
    made_imports,
    property_test,
    signature_test,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

IMPORTS = """
vllm.config: VllmConfig
vllm.exceptions: VLLMValidationError
vllm.logger: init_logger
vllm.sampling_params: SamplingParams
vllm.tokenizers: TokenizerLike
vllm.v1.core.sched.output: GrammarOutput SchedulerOutput
vllm.v1.outputs: ModelRunnerOutput
vllm.v1.request: Request RequestStatus
vllm.v1.structured_output: StructuredOutputManager
vllm.v1.structured_output.backend_guidance: GuidanceBackend GuidanceGrammar
vllm.v1.structured_output.backend_guidance: validate_guidance_grammar
vllm.v1.structured_output.backend_types: StructuredOutputBackend StructuredOutputGrammar
vllm.v1.structured_output.backend_types: StructuredOutputKey StructuredOutputOptions
vllm.v1.structured_output.backend_xgrammar: XgrammarBackend XgrammarGrammar
"""
SCHEDULER = "v1.core.sched.async_scheduler:AsyncScheduler."
SIGNATURES = {
    SCHEDULER + "get_grammar_bitmask": "self scheduler_output",
    SCHEDULER + "_handle_blocked_waiting_request": "self request",
    SCHEDULER + "_update_after_schedule": "self scheduler_output",
    SCHEDULER + "update_from_output": "self scheduler_output model_runner_output",
    "v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens": "self grammar_output",
    "v1.worker.gpu.async_utils:AsyncOutput.get_output": "self",
    "v1.structured_output:StructuredOutputManager.grammar_init": "self request",
    "v1.structured_output.backend_types:StructuredOutputBackend.compile_grammar": "self "
    "request_type grammar_spec stop_token_ids=None",
    "sampling_params:StructuredOutputsParams.all_constraints_none": "self",
    "v1.structured_output.backend_guidance:validate_guidance_grammar": "sampling_params "
    "tokenizer=None",
}
FIELDS = {
    AsyncOutput: "sampled_token_ids",
    GPUModelRunner: "sampler execute_model_state",
    GrammarOutput: "structured_output_request_ids grammar_bitmask num_acceptable_drafts",
    GuidanceGrammar: "ll_matcher",
    ModelRunnerOutput: "req_id_to_index sampled_token_ids",
    Request: "structured_output_request is_prefill_chunk num_prompt_tokens",
    SamplingParams: "stop_token_ids structured_outputs logprobs",
    SchedulerOutput: "has_structured_output_requests pending_structured_output_tokens "
    "num_scheduled_tokens scheduled_spec_decode_tokens",
    StructuredOutputManager: "backend executor tokenizer vllm_config",
    StructuredOutputsParams: "_backend _backend_was_auto",
    XgrammarGrammar: "matcher",
}
PROPERTIES = {
    Request: "use_structured_output num_tokens",
    SamplingParams: "all_stop_token_ids",
    StructuredOutputRequest: "grammar structured_output_key",
}
XGRAMMAR = "accept_token rollback is_completed fill_next_token_bitmask fork"
LLGUIDANCE = (
    "validate_tokens consume_token rollback is_accepting is_stopped is_error deep_copy"
)


def test_imports_are_listed() -> None:
    assert set(made_imports(*GRAMMARS)) == listed_imports(IMPORTS)


test_import = import_test(IMPORTS)
test_signature = signature_test(SIGNATURES)
test_fields = field_test(FIELDS)
test_properties = property_test(PROPERTIES)


def test_a_grammar_of_vllm_has_just_these_methods() -> None:
    """More of them would have to be written, or vLLM could not build ours."""
    assert set(StructuredOutputGrammar.__abstractmethods__) == {
        *(
            "accept_tokens",
            "fill_bitmask",
            "is_terminated",
            "reset",
            "rollback",
            "validate_tokens",
        ),
    }


def test_a_backend_of_vllm_has_just_these_methods() -> None:
    found = set(StructuredOutputBackend.__abstractmethods__)
    assert found == {"allocate_token_bitmask", "compile_grammar", "destroy"}


def test_matchers() -> None:
    assert [
        name for name in XGRAMMAR.split() if not hasattr(xgrammar.GrammarMatcher, name)
    ] == []
    assert [
        name for name in LLGUIDANCE.split() if not hasattr(llguidance.LLMatcher, name)
    ] == []
