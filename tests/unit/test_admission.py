"""What admission refuses of vLLM's own sampling parameters."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_outlines import (
    validate_structured_output_request_outlines,
)

from dllm_plugin.api.plugin import give_template_defaults
from dllm_plugin.config.options import Options
from dllm_plugin.config.resolution import resolve
from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.engine.admission import request_rules

RULES = request_rules(resolve(Options(), "LLaDAModelLM", 512, 300))
# What vLLM's beam search asks for, but for the log-probabilities of its width.
BEAM = {"max_tokens": 1, "logprobs": 4, "watermarking": False, "detokenize": False}
HUGE = StructuredOutputsParams(json={"type": "integer", "maximum": 10**30})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"bad_words": ["x" * 65]}, "bad_words"),
        ({"seed": 2**63 - 1, "n": 2}, "seed"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        (
            {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3},
            "min_tokens",
        ),
        (BEAM, "use_beam_search is not supported"),
        ({"stream_interval": 2**64}, "stream_interval must fit in 64 bits"),
        ({"structured_outputs": HUGE}, "structured_outputs must fit in 64 bits"),
        ({"extra_args": {"dllm_steps": 3_000_000_000}}, "dllm_steps"),
    ],
)
def test_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RULES.validate_params(SamplingParams(**options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop_token_ids": list(range(128)), "bad_words": ["x" * 64]},
        {"seed": 2**63 - 2, "n": 2},
        {"presence_penalty": 0.5, "frequency_penalty": -2.0},
        {"repetition_penalty": 1.1},
        {"allowed_token_ids": [5, 300], "min_tokens": 3},
        {"extra_args": {"other": 1, 3: 1}},
        BEAM | {"watermarking": None},
        BEAM | {"logprobs": None},
    ],
)
def test_accepted(options: dict[str, Any]) -> None:
    RULES.validate_params(SamplingParams(**options))


def test_rules_travel_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(RULES)).config == RULES.config


OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}
NAMED = {"^x-": {"type": "integer"}}
# vLLM would give these to a backend that a canvas cannot use.
BY_GUIDANCE: dict[str, dict[str, Any]] = {
    "beside properties": OBJECT | {"patternProperties": NAMED},
    "two patterns": {
        "type": "object",
        "patternProperties": NAMED | {"^y-": {"type": "string"}},
    },
    "closed": OBJECT | {"patternProperties": NAMED, "additionalProperties": False},
    "multipleOf": {
        "type": "object",
        "patternProperties": {"^a": {"type": "integer", "multipleOf": 3}},
    },
    "allOf": {
        "allOf": [
            {"type": "object", "patternProperties": NAMED},
            {"type": "object", "required": ["a"]},
        ]
    },
    "recursive": OBJECT | {"patternProperties": {"^x-": {"$ref": "#"}}},
    "named like the keyword": {
        "type": "object",
        "properties": {"patternProperties": {"type": "integer", "multipleOf": 2}},
    },
}
BY_NONE: dict[str, dict[str, Any]] = {
    "uniqueItems": OBJECT
    | {"patternProperties": {"^b": {"type": "array", "uniqueItems": True}}},
    "not": OBJECT | {"patternProperties": NAMED, "not": {"required": ["b"]}},
    "if": OBJECT | {"patternProperties": NAMED, "if": {"required": ["b"]}},
    "propertyNames": {
        "type": "object",
        "patternProperties": NAMED,
        "propertyNames": {"maxLength": 5},
    },
    "patterns that overlap": {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer"}, "x$": {"type": "number"}},
    },
    "minProperties": OBJECT | {"patternProperties": NAMED, "minProperties": 2},
    "look-ahead": OBJECT | {"patternProperties": {"^(?!x)": {"type": "integer"}}},
}


def left_to_outlines(schema: dict[str, Any]) -> SamplingParams:
    asked = StructuredOutputsParams(json=schema)
    asked._backend, asked._backend_was_auto = "outlines", True
    validate_structured_output_request_outlines(
        SamplingParams(structured_outputs=asked)
    )
    return SamplingParams(structured_outputs=asked)


@pytest.mark.parametrize("name", BY_GUIDANCE)
def test_schemas_that_guidance_reads(name: str) -> None:
    params = left_to_outlines(BY_GUIDANCE[name])
    RULES.validate_params(params)
    assert params.structured_outputs is not None
    assert params.structured_outputs._backend == "guidance"


@pytest.mark.parametrize("name", BY_NONE)
def test_schemas_that_no_backend_reads(name: str) -> None:
    with pytest.raises(ValueError, match="neither xgrammar nor guidance") as caught:
        RULES.validate_params(left_to_outlines(BY_NONE[name]))
    assert "utlines" not in str(caught.value)


def test_reasoning_parsers_know_the_defaults_of_templates() -> None:
    """Otherwise a parser takes an answer without thoughts for thoughts."""

    def handlers() -> Any:
        chat = {"default_chat_template_kwargs": {"a": 1}}
        return State(
            {
                "openai_serving_chat": SimpleNamespace(**chat),
                "openai_serving_chat_batch": SimpleNamespace(**chat),
                "anthropic_serving_messages": SimpleNamespace(
                    default_chat_template_kwargs={"enable_thinking": True}
                ),
                "openai_serving_responses": SimpleNamespace(chat_template_kwargs={}),
            }
        )

    state = handlers()
    give_template_defaults(state, FAMILIES["A2DQwen3LMHeadModel"])
    off = {"enable_thinking": False}
    assert state.openai_serving_chat.default_chat_template_kwargs == off | {"a": 1}
    assert state.openai_serving_chat_batch.default_chat_template_kwargs == off | {
        "a": 1
    }
    messages = state.anthropic_serving_messages
    assert messages.default_chat_template_kwargs == {"enable_thinking": True}
    assert state.openai_serving_responses.chat_template_kwargs == off
    state = handlers()
    give_template_defaults(state, FAMILIES["LLaDAModelLM"])
    assert state.openai_serving_chat.default_chat_template_kwargs == {"a": 1}
