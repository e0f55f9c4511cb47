"""Bodies that vLLM's own checks would answer with an internal error."""

import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field, ValidationError, field_validator
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar
from vllm.v1.structured_output.backend_outlines import (
    validate_structured_output_request_outlines,
)

from dllm_plugin.api.body_checks import (
    BodyChecks,
    check_body,
    check_invocation,
    sentence_of,
)
from dllm_plugin.config.request.structured_outputs import SENT_AS, check_grammars


@pytest.fixture(autouse=True)
def field_is_forgotten() -> Iterator[None]:
    """Forget which field held a grammar: a server reads each body in a context of its own."""
    token = SENT_AS.set(SENT_AS.get())
    yield
    SENT_AS.reset(token)


MESSAGE = {"type": "message", "role": "assistant"}
CHOSEN = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
FINE = {"role": "user", "content": [{"type": "text", "text": "a"}]}
REFUSED = [
    ({"structured_outputs": "a"}, "structured_outputs must be an object, got 'a'"),
    ({"structured_outputs": {"jsn": {}}}, "no field 'jsn' (did you mean json?); known"),
    ({"structured_outputs": {}}, "structural_tag, got none."),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "got json and regex."),
    ({"messages": 5}, "messages must be a list of at least one message, got 5."),
    ({"messages": None}, "messages must be a list of at least one message, got No"),
    ({"tools": {"a": 1}}, "tools must be a list, got {'a': 1}."),
    ({"prompt": "a", "dllm_policy": "entropy"}, "dllm_policy has no effect beside"),
    ({"messages": [{"tool_calls": 5}]}, "messages.0.tool_calls must be a list, got 5"),
    ({"messages": [[FINE | {"content": [{"text": 5}]}]]}, "messages.0.0.content.0.te"),
    ({"messages": [[FINE | {"content": 5}]]}, "must be a string or a list, got 5."),
    ({"stream_options": [1]}, "stream_options must be an object, got [1]"),
    ({"request_id": "a\ud800"}, "request_id holds '\\ud800' in 'a\\ud800', half of"),
    ({"a": [{"b": {"\udfff": 1}}]}, "a holds '\\udfff'"),
    ({"\ud800": 1}, "A name of the body holds"),
    ({"stream_interval": 10**40}, "stream_interval must fit in 64 bits, got 1000"),
    ({"vllm_xargs": {"a": [-(2**63) - 1]}}, "vllm_xargs must fit in 64 bits"),
    ({"input": [MESSAGE | {"content": []}]}, "message without content"),
    (
        {"input": [MESSAGE | {"content": [{"type": "refusal"}]}]},
        "an assistant's refusal",
    ),
    (
        {"input": [{"created_by": None, "output": [{"type": "input_text"}]}]},
        "leave created_by out",
    ),
    (CHOSEN | {"tools": [{}]}, "tools holds {}: a function needs a name"),
    (CHOSEN | {"tools": [{"function": {}}]}, "a function needs a name"),
    (CHOSEN | {"tools": "f"}, "tools must be a list, got 'f'"),
]
TAKEN = [
    {"structured_outputs": {"regex": "a"}, "stream_options": None},
    {"prompt": "\N{HOT PEPPER}", "stop": []},
    {"input": [{"role": "user", "content": [{"type": "refusal"}]}, "a"]},
    {"input": "refusal"},
    {"messages": [[FINE, FINE]]},
    {"text": "a", "messages": None, "tools": None},
    {"input": "a", "messages": None},
    {"seed": 2**64 - 1, "response_format": {"maximum": 10**40}},
    ["structured_outputs"],
    {"prompt": "a", "vllm_xargs": {"dllm_policy": "entropy"}},
    CHOSEN | {"tools": [{"type": "function", "function": {"name": "f"}}]},
    CHOSEN,
    {"tool_choice": {"type": "tool", "name": "f"}, "tools": [{"name": "f"}]},
]


@pytest.mark.parametrize(("body", "sentence"), REFUSED, ids=ascii)
def test_refused(body: object, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_body(json.dumps(body).encode(), "/v1/completions")
    assert sentence in str(caught.value)


def test_escaped_names_are_read() -> None:
    body = rb'{"prompt": "a", "\u0064llm_policy": "entropy"}'
    with pytest.raises(ValueError, match="dllm_policy has no effect beside"):
        check_body(body, "/v1/completions")


@pytest.mark.parametrize("body", TAKEN, ids=ascii)
def test_taken(body: object) -> None:
    check_body(json.dumps(body).encode(), "/v1/completions")


class Message(BaseModel):
    role: Literal["user", "tool"]
    content: str


class Call(BaseModel):
    kind: Literal["call"]
    name: str


class Output(BaseModel):
    kind: Literal["output"]
    parts: list[Message]


class Asked(BaseModel):
    """A body with fields of many kinds."""

    prompt: str | list[int]
    stop: str | list[str] = ""
    n: int = Field(1, ge=1)
    on: bool = False
    messages: list[Message | str] = []
    items: list[Output | Call] = []
    numbers: dict[str, int] = {}

    @field_validator("stop")
    @classmethod
    def checked(cls, stop: Any) -> Any:
        """Refuse as vLLM does."""
        if stop == "never":
            raise VLLMValidationError("stop is never", parameter="stop", value=stop)
        return stop


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ([], "The body must be an object, got []."),
        ({}, "prompt is missing: give it."),
        ({"prompt": 5}, "prompt must be a string or a list, got 5."),
        ({"prompt": ["a", 1]}, "prompt.0 must be an integer, got 'a'."),
        ({"prompt": "a", "stop": [5]}, "stop.0 must be a string, got 5."),
        ({"prompt": "a", "stop": "never"}, "stop is never"),
        ({"prompt": "a", "n": 0}, "n must be greater than or equal to 1, got 0."),
        ({"prompt": "a", "n": "x"}, "n must be an integer, got 'x'."),
        ({"prompt": "a", "n": 1.5}, "n must be an integer, got 1.5."),
        ({"prompt": "a", "on": "maybe"}, "on must be a boolean, got 'maybe'."),
        (
            {"prompt": "a", "messages": [{"role": "x", "content": "it's"}]},
            "messages.0.role must be 'user' or 'tool', got 'x'.",
        ),
        ({"prompt": "a", "messages": [{"role": "tool"}]}, "messages.0.content is mis"),
        (
            {"prompt": "a", "items": [{"kind": "call"}]},
            "items.0.name is missing: give it.",
        ),
        ({"prompt": "a", "numbers": {"a'b": "x"}}, "numbers.a'b must be an integer"),
        (b'{"a":', "The body is no JSON: Expecting value, at character 5."),
        (b"", "The body is missing: give it."),
    ],
    ids=str,
)
def test_a_wrong_shape_is_one_sentence(body: Any, sentence: str) -> None:
    """vLLM's own handler lists pydantic's errors; the middleware replaces the list."""
    app = FastAPI()
    app.add_middleware(BodyChecks)
    app.state.args = Namespace(log_error_stack=False)
    app.state.diffuplug = None
    init_exception_handler(app)

    @app.post("/")
    async def route(asked: Asked) -> None:
        """Take the body."""

    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    reply = TestClient(app).post("/", content=content, headers=headers)
    assert reply.status_code == 400
    said = reply.json()["error"]["message"]
    assert said.startswith(sentence) and "\n" not in said


def test_errors_that_pydantic_wrote_are_one_sentence() -> None:
    """They come of requests that vLLM makes of a body."""
    body = {"prompt": "a", "messages": [{"role": "tool"}], "n": "x"}
    with pytest.raises(ValidationError) as caught:
        Asked.model_validate(body)
    said = sentence_of(str(caught.value), json.dumps(body).encode())
    assert said == "messages.0.content is missing: give it."


OF_LISTS = "1 validation error for ValidatorIterator\n0.text\n  Field required [type="
NO_OBJECT = "1 validation errors:\n  {'loc': 'body.0', 'msg': 'Input "
NO_OBJECT += "should be a valid dictionary', 'input': '5'}"
CALLS = {"role": "assistant", "content": "a"}
UNCALLED = {"id": "a", "type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("errors", "messages", "sentence"),
    [
        (
            OF_LISTS,
            [FINE, FINE | {"content": [{"type": "text"}]}],
            "messages.1.content.0.text is missing: give it.",
        ),
        (OF_LISTS, [FINE, FINE], "messages hold a part or a call that is not valid: "),
        (
            OF_LISTS,
            [FINE | CALLS | {"tool_calls": [UNCALLED]}],
            "messages.0.tool_calls.0.function.arguments is missing",
        ),
        (
            NO_OBJECT,
            [FINE, {"role": "system", "content": [5]}],
            "messages.1.content.0 must be an object, got 5.",
        ),
        (
            OF_LISTS,
            [FINE, CALLS | {"content": {"a": 1}}],
            "messages.1.content must be a string",
        ),
        (
            NO_OBJECT,
            [FINE | CALLS | {"tool_calls": [5]}],
            "messages.0.tool_calls.0 must be an",
        ),
        (NO_OBJECT, [5], "messages hold a part or a call that is not valid"),
        # A part that only /v1/messages has.
        (
            OF_LISTS,
            [FINE | {"content": [{"type": "tool_use"}]}],
            "messages hold a part",
        ),
    ],
    ids=str,
)
def test_errors_of_lists_that_are_read_late(
    errors: str, messages: list[Any], sentence: str
) -> None:
    """They name no message: what is wrong is looked up in the body."""
    said = sentence_of(errors, json.dumps({"messages": messages}).encode())
    assert said.startswith(sentence)
    without = sentence_of(errors, json.dumps({"prompt": "a"}).encode())
    assert without.startswith("messages hold a part or a call that is not valid")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ([], "The body must be an object, got []."),
        ({"messages": None, "prompt": "a"}, "messages must be a list of at least one"),
        (
            {"messages": [CALLS | {"tool_calls": [5]}]},
            "messages.0.tool_calls.0 must be",
        ),
        ({"messages": [FINE | {"content": 5}]}, "messages.0.content must be a string"),
        ({"prompt": "a", "max_tokens": "x"}, "max_tokens must be an integer, got 'x'."),
    ],
)
def test_invocations_say_what_is_wrong(body: Any, sentence: str) -> None:
    """vLLM tries one route after another, and names what the last of them lacks."""
    with pytest.raises(ValueError) as caught:
        check_invocation(json.dumps(body).encode())
    assert str(caught.value).startswith(sentence)
    for taken in ({"messages": [FINE]}, {"input": "a"}, {"requestType": "NEW_SESSION"}):
        check_invocation(json.dumps(taken).encode())
    check_invocation(b"{")


FAR = {
    "type": "object",
    "patternProperties": {"^b": {"type": "integer"}},
    "additionalProperties": False,
}
WITH_SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": FAR}}},
    {"structured_outputs": {"json": FAR}},
    {"text": {"format": {"type": "json_schema", "schema": FAR}}},
    {"tools": [{"function": {"parameters": FAR}}], "tool_choice": "required"},
    {"tools": [{"parameters": FAR}], "tool_choice": {"type": "function"}},
    {"tools": [{"input_schema": FAR}], "tool_choice": {"type": "any"}},
]


def verify(params: SamplingParams, backend: str) -> None:
    """Do as vLLM does, whose choice among backends needs an engine."""
    asked = params.structured_outputs
    assert asked is not None
    if backend or "patternProperties" not in str(asked.json):
        validate_guidance_grammar(params)
    else:
        validate_structured_output_request_outlines(params)


@pytest.mark.parametrize("body", WITH_SCHEMAS, ids=str)
def test_schemas_that_vllm_refuses_for_another_backend(body: dict[str, Any]) -> None:
    field = next(iter(body))
    with pytest.raises(ValueError, match=f"^{field}.* has .*guidance") as caught:
        check_grammars(json.dumps(body).encode(), verify)
    assert "utlines" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"tools": [{"function": {"parameters": FAR}}]},
        {"text": "a"},
        {"tools": [{"input_schema": FAR}], "tool_choice": {"type": "auto"}},
        {
            "tools": [{"name": "a", "input_schema": FAR}, {"name": "b"}],
            "tool_choice": {"type": "tool", "name": "b"},
        },
    ],
    ids=str,
)
def test_bodies_without_such_a_schema(body: Any) -> None:
    check_grammars(json.dumps(body).encode(), verify)


def test_all_fields_with_a_schema_are_named() -> None:
    """The engine's client may refuse any of them, and does not see which was sent."""
    schema = {"type": "string"}
    body = {
        "response_format": {"json_schema": {"schema": schema}},
        "tools": [{"function": {"name": "f", "parameters": schema}}],
        "tool_choice": "required",
    }
    check_grammars(json.dumps(body).encode(), verify)
    assert SENT_AS.get() == "response_format or tools"
    with pytest.raises(ValueError, match="response_format.json_schema.schema is miss"):
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a"}}
        check_grammars(json.dumps(body).encode(), verify)
    body = {"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}
    check_grammars(json.dumps(body).encode(), verify)


UNREAD: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "array", "uniqueItems": True}}, 'the keywords "uniqueItems"'),
    (
        {"json": FAR | {"properties": {"a": {"not": {"type": "null"}}}}},
        'the keywords "not"',
    ),
    ({"json": {"type": "string", "format": "colour"}}, "format colour"),
    ({"json": {"type": "strng"}}, "an error (Invalid type: strng)"),
    ({"json": {"$ref": "#/$defs/a"}}, "an error (Pointer '/$defs/a' does"),
    ({"json": {"$ref": "https://a.org/b"}}, "a $ref to https://a.org/b, which is no"),
    ({"json": {"type": "integer", "minimum": 10**20}}, "a bound beyond 64 bits"),
    ({"json": {"enum": []}}, "(Unsatisfiable schema: anyOf is empty)"),
    ({"json": {"oneOf": [{}, {"type": "null"}]}}, "alternatives that may overlap"),
    (
        {"json": {"items": {"$ref": "#"}, "allOf": [{"$ref": "#"}]}},
        "a $ref to # in itself, beside keywords",
    ),
    ({"json": {"type": "string", "pattern": "a(?=b)"}}, "the pattern 'a(?=b)', which"),
    ({"json": {"pattern": "a$b", "type": "string"}}, "'a$b', which looks at the text"),
    ({"regex": r"\bcat\b"}, "which looks at the text around it"),
    ({"regex": "(a"}, "the expression"),
    ({"grammar": "start: /a(?=b)/"}, "look-ahead and look-behind"),
]


@pytest.mark.parametrize(("asked", "words"), UNREAD, ids=str)
def test_grammars_that_no_backend_reads(asked: dict[str, Any], words: str) -> None:
    """Each gets one sentence of ours, with what was asked for."""
    body = json.dumps({"structured_outputs": asked}).encode()
    with pytest.raises(ValueError, match="^structured_outputs ") as caught:
        check_grammars(body, verify)
    assert words in str(caught.value)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
