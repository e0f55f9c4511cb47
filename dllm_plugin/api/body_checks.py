"""Refuse bodies that vLLM's own checks answer with an internal error: ASGI middleware."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import State
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from dllm_plugin.config.grammar_refusals import refusal_of
from dllm_plugin.config.request.checks import check_characters, leaves_of
from dllm_plugin.config.request.structured_outputs import (
    OF_COMPILERS,
    SENT_AS,
    check_expressions,
    field_of,
)
from dllm_plugin.config.validation import shown

SMALLEST = -(2**63)
LARGEST = 2**64 - 1
OF_SCHEMAS = ("response_format", "structured_outputs", "tools", "text")
# Where tools have a schema: of chats, of responses and of messages.
OF_TOOLS = (("function", "parameters"), ("parameters",), ("input_schema",))
OBJECTS = ("structured_outputs", "stream_options")
REFUSAL = "refusal"
GRAMMARS = re.compile(
    rb'"(?:structured_outputs|response_format|tool_choice)"|"text"\s*:\s*\{'
)
# vLLM asks a backend that cannot serve a canvas about schemas with `patternProperties`.
OF_THAT_BACKEND = ("Failed to transform json schema into a regex", "Regex ")
# Of parameters and a backend; empty for that of the server.
Verifier = Callable[[SamplingParams, str], None]
SUSPECT = re.compile(
    rb'"(?:structured_outputs|stream_options|refusal|created_by|tool_choice)"'
    rb"|\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|:\s*\[\s*\]|\d{19}"
)
# A string that never ends is one match, or each of its quotes would be tried.
STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
BRACKETS = re.compile(rb"[\[\]{}]")
DEEPEST = 200  # of lists and objects, far below what Python reads


class BodyChecks:
    """Pass every request on but those with such a body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        try:
            check_body(body)
            if GRAMMARS.search(body):
                check_grammars(body, _verifier(scope["app"].state))
        except ValueError as error:
            reply = create_error_response(
                str(error), "BadRequestError", HTTPStatus.BAD_REQUEST
            )
            response = JSONResponse(reply.model_dump(), status_code=reply.error.code)
            await response(scope, receive, send)
            return
        messages.reverse()

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replayed, send)


def check_body(body: bytes) -> None:
    """Raise ValueError for a body that vLLM would answer with an internal error.

    Such a body is in UTF-16, is nested too deep, or has a field of a wrong type, half of a
    surrogate pair, or a number beyond 64 bits.
    """
    if b"\0" in body[:4] or body.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("The body is no UTF-8, in which JSON is sent: encode it so.")
    if body.count(b"[") + body.count(b"{") > DEEPEST:
        _check_depth(body)
    if not SUSPECT.search(body):
        return
    try:
        fields = json.loads(body)
    except ValueError:
        return  # the route refuses it with the place of the error
    if not isinstance(fields, dict):
        return
    for name in OBJECTS:
        value = fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(
                f"{name} must be an object, got {shown(value)}: see the API's fields."
            )
    _check_input(fields.get("input"))
    if isinstance(_at(fields, "tool_choice", "function"), dict):
        _check_tools(fields.get("tools"))
    for name, value in fields.items():
        check_characters("A name of the body", name)
        for leaf in leaves_of(value):
            if isinstance(leaf, str):
                check_characters(name, leaf)
            is_large = isinstance(leaf, int) and not SMALLEST <= leaf <= LARGEST
            if is_large and name not in OF_SCHEMAS:
                raise ValueError(f"{name} must fit in 64 bits, got {shown(leaf)}.")


def _check_depth(body: bytes) -> None:
    """Raise ValueError for lists and objects that stand too deep in each other."""
    depth = 0
    for bracket in BRACKETS.findall(STRINGS.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise ValueError(
                f"The body holds lists and objects more than {DEEPEST} deep in each other: "
                "write it flatter."
            )


def _check_input(items: Any) -> None:
    """Raise ValueError for messages of /v1/responses that vLLM cannot read."""
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        # vLLM reads such an item into objects, which its parser of messages does not take.
        if "created_by" in item and isinstance(item.get("output"), list):
            raise ValueError(
                "input holds a tool's output with created_by and a list: leave created_by out."
            )
        if item.get("role") != "assistant":
            continue
        parts = item.get("content")
        if parts == []:
            raise ValueError("input holds an assistant's message without content.")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") == REFUSAL:
                raise ValueError(
                    "input holds an assistant's refusal, which a chat template cannot "
                    "show: leave it out."
                )


def _check_tools(tools: Any) -> None:
    """Raise ValueError for tools among which vLLM cannot look for the chosen one."""
    if tools is None:
        return
    if not isinstance(tools, list):
        raise ValueError(f"tools must be a list, got {shown(tools)}.")
    for tool in tools:
        if _at(tool, "function", "name") is None:
            raise ValueError(f"tools holds {shown(tool)}: a function needs a name.")


def check_grammars(body: bytes, verify: Verifier) -> None:
    """Raise ValueError for a grammar that no backend of vLLM's compiles, in our words.

    Args:
        verify: vLLM's check of parameters by a backend; raises VLLMValidationError.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return  # the route refuses it with the place of the error
    fields_sent = []
    for field, kind, spec in _grammars(fields):
        SENT_AS.set(field)
        fields_sent.append(field)
        asked = StructuredOutputsParams(**{kind: spec})
        try:
            verify(SamplingParams(structured_outputs=asked), "")
        except VLLMValidationError as error:
            if OF_COMPILERS.match(str(error)):
                check_expressions(asked)
                if str(error).startswith(OF_THAT_BACKEND):
                    raise ValueError(_unlike_patterns(asked, verify)) from error
                raise ValueError(refusal_of(field_of(kind), error)) from error
    if fields_sent:  # read by the checks of the engine's client, which names no field
        SENT_AS.set(" or ".join(dict.fromkeys(fields_sent)))


def _unlike_patterns(asked: StructuredOutputsParams, verify: Verifier) -> str:
    """Return the sentence for a schema with patterns of names that xgrammar does not read."""
    asked._backend = None
    try:
        verify(SamplingParams(structured_outputs=asked), "guidance")
    except VLLMValidationError as error:
        return refusal_of(SENT_AS.get(), error)
    return (
        f"{SENT_AS.get()} has patternProperties beside keywords that xgrammar does not read: "
        "write it without one of them, or start with "
        "--structured-outputs-config.backend guidance."
    )


def _grammars(fields: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the field, the kind and the text of grammars that hold a reply."""
    for kind in ("regex", "grammar", "json"):
        if isinstance(spec := _at(fields, "structured_outputs", kind), str):
            yield f"structured_outputs {kind}", kind, spec
    found = [
        ("response_format", _at(fields, "response_format", "json_schema", "schema")),
        ("structured_outputs json", _at(fields, "structured_outputs", "json")),
        ("text", _at(fields, "text", "format", "schema")),
    ]
    choice = _at(fields, "tool_choice")
    tools = _at(fields, "tools")
    mode = choice.get("type") if isinstance(choice, dict) else choice
    if mode not in (None, "auto", "none"):
        chosen = _at(choice, "function", "name") or _at(choice, "name")
        for tool in tools if isinstance(tools, list) else ():
            names = (_at(tool, "function", "name"), _at(tool, "name"))
            if chosen is None or chosen in names:
                for path in OF_TOOLS:
                    found.append(("tools", _at(tool, *path)))
    for field, schema in found:
        if isinstance(schema, dict):
            yield field, "json", schema


def _at(value: Any, *names: str) -> Any:
    """Return what stands under names; None if an object has no such name."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _verifier(state: State) -> Verifier:
    """Return vLLM's check of parameters for the served model."""
    ours = state.diffuplug
    if ours is None:
        return lambda *_: None
    config = ours.engine.vllm_config
    tokenizer = state.openai_serving_completion.renderer.get_tokenizer()

    def verify(params: SamplingParams, backend: str) -> None:
        settings = config.structured_outputs_config
        if backend:
            settings = dataclasses.replace(settings, backend=backend)
        params.verify(config.model_config, None, settings, tokenizer)

    return verify
