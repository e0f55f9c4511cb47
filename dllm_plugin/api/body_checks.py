"""Refuse bodies that vLLM's own checks answer with an internal error: ASGI middleware.

What pydantic refuses gets one sentence, too, in place of its list of errors.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders, State
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from dllm_plugin.config.options import REQUEST_PREFIX
from dllm_plugin.config.request.checks import check_characters, leaves_of
from dllm_plugin.config.request.structured_outputs import Verifier, at, check_grammars
from dllm_plugin.config.validation import check_depth, did_you_mean, shown

from .answers import LOOKED_FOR, check_fields, has_common, refusal
from .output_processor import refusing

SMALLEST = -(2**63)
LARGEST = 2**64 - 1
OF_SCHEMAS = ("response_format", "structured_outputs", "tools", "text")
INVOCATIONS = "/invocations"
OBJECTS = ("structured_outputs", "stream_options")
LISTS = {"messages": "a list of at least one message", "tools": "a list"}
# Of bodies whose messages may be null.
OTHER_TEXTS = {"prompt", "input", "text", "parts", "draft"}
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OF_OUTPUTS = [
    field.name for field in dataclasses.fields(StructuredOutputsParams) if field.init
]
# vLLM's list of pydantic's errors: in a reply, and one of its lines.
LISTED = re.compile(rb'"message":"\d+ validation error')
ERROR = re.compile(
    r"""'loc': (?P<l>['"])(?P<loc>.*?)(?P=l), 'msg': (?P<q>['"])(?P<msg>.*?)(?P=q), 'input'"""
)
# As pydantic writes errors itself: of bodies that vLLM makes of others, and of parts of messages.
WRITTEN = re.compile(r"^(?P<loc>\S+)\n  (?P<msg>.*?) \[type=", re.MULTILINE)
OF_LISTS = re.compile(r"(?:body\.)?\d+(?:\.|$)")
WORD = re.compile(r"Input should be '")
REASON = re.compile(r"""'ctx': {'error': (['"])(.*?)\1}""")
RULE = re.compile(r"should (.*?)(?:, unable to .*|, got .*)?$")
PARAMETER = re.compile(r" \(parameter=.*\)$")
OBJECT = re.compile(r"a valid dictionary.*")
LIST = re.compile(r"iterable$")
REFUSAL, QUERY = "refusal", "query."
GRAMMARS = re.compile(
    rb'"(?:structured_outputs|response_format|tools|output_config)"|"text"\s*:\s*\{|\\u00[0-7]'
)
SUSPECT = re.compile(
    rb'"(?:structured_outputs|stream_options|refusal|created_by|tool_choice|dllm_\w+)"'
    + f'|"(?:{"|".join(sorted(LOOKED_FOR))})"'.encode()
    + rb'|"(?:messages|tools|tool_calls)"\s*:\s*[^\s\[]|"messages"\s*:\s*\[\s*\['
    rb"|\\u[dD][89a-fA-F]|\\u00[0-7]|\xed[\xa0-\xbf]|:\s*\[\s*\]|\d{19}"
)
# Parts of messages that only /v1/messages has.
OF_ANTHROPIC = re.compile(rb'"type"\s*:\s*"(?:tool_use|tool_result|image)"')


class BodyChecks:
    """Pass every request on but those with such a body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if not is_post:
            await self.app(scope, receive, send)
            return
        if _has_files(scope):
            await self.app(scope, receive, _rewording(send, b""))
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        try:
            is_ours = scope["app"].state.diffuplug is not None
            check_body(body, scope["path"] if is_ours else "")
            if scope["path"] == INVOCATIONS:
                check_invocation(body)
            if GRAMMARS.search(body):
                check_grammars(body, _verifier(scope["app"].state))
                send = refusing(scope, receive, send)
        except ValueError as error:
            reply = refusal(str(error))
            response = JSONResponse(reply.model_dump(), status_code=reply.error.code)
            await response(scope, receive, send)
            return
        messages.reverse()

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replayed, _rewording(send, body))


def _has_files(scope: Scope) -> bool:
    return Headers(scope=scope).get("content-type", "").startswith("multipart/")


def _rewording(send: Send, body: bytes) -> Send:
    """Return a sender that replaces a list of pydantic's errors by one sentence."""
    held: list[Message] = []

    async def sent(message: Message) -> None:
        if not held and message.get("status") != HTTPStatus.BAD_REQUEST:
            await send(message)
            return
        held.append(message)
        if len(held) == 1 or message.get("more_body"):
            return
        reply = b"".join(part.get("body", b"") for part in held)
        reply = _reworded(reply, body)
        MutableHeaders(scope=held[0])["content-length"] = str(len(reply))
        await send(held[0])
        await send({"type": "http.response.body", "body": reply})
        held.clear()

    return sent


def _reworded(reply: bytes, body: bytes) -> bytes:
    """Return a reply with one sentence for a list of pydantic's errors; others as they are."""
    if not LISTED.search(reply[:200]):
        return reply
    content = json.loads(reply)
    content["error"]["message"] = sentence_of(content["error"]["message"], body)
    return bytes(JSONResponse(content).body)


def sentence_of(errors: str, body: bytes) -> str:
    """Return a sentence for pydantic's errors, as vLLM lists them or as pydantic does.

    Of the types that a field may have, the type that reads most of the value counts.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    found = _listed(errors)
    is_late = found and OF_LISTS.match(found[0][0])
    if isinstance(fields, dict) and is_late and not OF_ANTHROPIC.search(body):
        # Some lists are read later than their message, which their errors do not name.
        found = _wrong_list(fields) or found
    if not found:
        return " ".join(errors.split("\n")[1:]).strip() or "The body is not valid."
    place, said = found[0]
    if said == "JSON decode error":
        why = REASON.search(errors)
        said = why[2] if why else said
        at_place = place.removeprefix("body.")
        return f"The body is no JSON: {said}, at character {at_place}."
    if place.startswith(QUERY):
        return f"{place.removeprefix(QUERY)}: {said}."
    if isinstance(fields, dict) and OF_LISTS.match(place):
        last = place.rpartition(".")[2]
        return f"messages hold a part or a call that is not valid: {last}: {said}."
    return _said(found, fields)


def _said(found: list[tuple[str, str]], fields: Any) -> str:
    """Return a sentence for the places and words of errors."""
    # A kind whose fixed word differs is not what was meant.
    others = tuple(loc.rpartition(".")[0] for loc, said in found if WORD.match(said))
    meant = [entry for entry in found if not entry[0].startswith(others)]
    if any(said == "Field required" for _, said in meant):
        found = meant
    place, said = max(found, key=lambda entry: len(_known_steps(entry[0], fields)))
    names = _known_steps(place, fields)
    name = ".".join(names) or "The body"
    if said == "Field required":
        last = place.removeprefix("body").split(".")[-1]
        return f"{'.'.join([*names, last]) or 'The body'} is missing: give it."
    for start in ("Value error, ", "Assertion failed, "):
        if said.startswith(start):
            return PARAMETER.sub("", said.removeprefix(start))
    rules = []
    for loc, words in found:
        rule = RULE.search(words)
        if rule and _known_steps(loc, fields) == names:
            words = LIST.sub("a list", OBJECT.sub("an object", rule[1]))
            rules.append(words.replace("a valid ", "a "))
    value = shown(_at_steps(fields, names))
    if not rules:
        return f"{name}: {said}, got {value}."
    allowed = " or ".join(dict.fromkeys(rules)).replace("a integer", "an integer")
    return f"{name} must {allowed}, got {value}.".replace(" or be ", " or ")


def _listed(errors: str) -> list[tuple[str, str]]:
    """Return the places and words of errors, as vLLM lists them or as pydantic does."""
    entries = list(ERROR.finditer(errors)) or WRITTEN.finditer(errors)
    return [(e["loc"], e["msg"].replace("\\'", "'")) for e in entries]


def _lists_of(messages: Any, within: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield where messages, or those of a batch, have parts or tool calls: place, message, name."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        place = f"{within}.{i}"
        yield from _lists_of(message, place)
        for name in ("content", "tool_calls"):
            value = at(message, name)
            if value is not None and (name != "content" or not isinstance(value, str)):
                yield place, message, name


def _wrong_list(
    fields: dict[str, Any], only_batches: bool = False
) -> list[tuple[str, str]]:
    """Return what is wrong with a list of a message; vLLM reads those of a batch too late."""
    for place, message, name in _lists_of(fields.get("messages"), "messages"):
        if not isinstance(message[name], list):
            kinds = "a list" if name == "tool_calls" else "a string or a list"
            return [(f"{place}.{name}", f"should be {kinds}")]
        if only_batches and place.count(".") == 1:
            continue
        alone = {"content": "", **message}
        if name == "content":
            alone.pop("tool_calls", None)
        else:
            alone["content"] = ""
        try:
            request = ChatCompletionRequest.model_validate({"messages": [alone]})
            list(at(request.messages[0], "content") or ())
        except (ValidationError, VLLMValidationError) as error:
            found = _listed(str(error))
            if found and OF_LISTS.match(found[0][0]):
                return [(f"{place}.{name}.{loc}", said) for loc, said in found]
    return []


def _known_steps(place: str, fields: Any) -> list[str]:
    """Return the steps of a place that lead into a body: pydantic's name types, too."""
    steps: list[str] = []
    for step in place.removeprefix("body").split("."):
        value = _at_steps(fields, steps)
        is_place = isinstance(value, list) and step.isdecimal()
        is_name = isinstance(value, dict) and step in value
        if is_name or (is_place and int(step) < len(value)):
            steps.append(step)
    return steps


def _at_steps(value: Any, steps: list[str]) -> Any:
    for step in steps:
        value = value[int(step) if isinstance(value, list) else step]
    return value


def check_body(body: bytes, path: str) -> None:
    """Raise ValueError for a body that vLLM would answer with an internal error, or not read.

    Such a body is in UTF-16, is nested too deep, or has a field of a wrong type or of other
    servers, half of a surrogate pair, or a number beyond 64 bits. No path: of another's model.
    """
    try:
        body.decode(errors="surrogatepass")
        is_utf8 = b"\0" not in body[:4]
    except UnicodeDecodeError:
        is_utf8 = False
    if not is_utf8:
        raise ValueError("The body is no UTF-8, in which JSON is sent: encode it so.")
    check_depth(body)
    if not (SUSPECT.search(body) or has_common(body, path)):
        return
    try:
        fields = json.loads(body)
    except json.JSONDecodeError:
        return  # the route refuses it with the place of the error
    except ValueError:
        raise ValueError(
            f"The body holds a number of more than {sys.get_int_max_str_digits()} digits: write "
            "a smaller number."
        ) from None
    if not isinstance(fields, dict):
        return
    check_fields(path, fields)
    for name in OBJECTS:
        value = fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(
                f"{name} must be an object, got {shown(value)}: see the API's fields."
            )
    for name, words in LISTS.items():
        value = fields.get(name)
        is_open = value is None and (name != "messages" or fields.keys() & OTHER_TEXTS)
        if name in fields and not is_open and not isinstance(value, list):
            raise ValueError(f"{name} must be {words}, got {shown(value)}.")
    if wrong := _wrong_list(fields, only_batches=True):
        raise ValueError(_said(wrong, fields))
    _check_outputs(fields.get("structured_outputs"))
    _check_input(fields.get("input"))
    if isinstance(at(fields, "tool_choice", "function"), dict):
        # Among tools without names vLLM cannot look for the chosen one.
        for tool in fields.get("tools") or ():
            if at(tool, "function", "name") is None:
                raise ValueError(f"tools holds {shown(tool)}: a function needs a name.")
    for name, value in fields.items():
        check_characters("A name of the body", name)
        if name.startswith(REQUEST_PREFIX):
            raise ValueError(
                f"{name} has no effect beside the API's own fields: write it into vllm_xargs."
            )
        for leaf in leaves_of(value):
            if isinstance(leaf, str):
                check_characters(name, leaf)
            is_large = isinstance(leaf, int) and not SMALLEST <= leaf <= LARGEST
            if is_large and name not in OF_SCHEMAS:
                raise ValueError(f"{name} must fit in 64 bits, got {shown(leaf)}.")


def check_invocation(body: bytes) -> None:
    """Raise ValueError for a body that is neither a chat nor a completion."""
    with suppress(json.JSONDecodeError, VLLMValidationError):  # which vLLM answers
        fields = json.loads(body)
        if not isinstance(fields, dict):
            raise ValueError(f"The body must be an object, got {shown(fields)}.")
        if not isinstance(fields.get("messages", []), list):
            messages = shown(fields["messages"])
            raise ValueError(f"messages must be {LISTS['messages']}, got {messages}.")
        kind = ChatCompletionRequest if "messages" in fields else CompletionRequest
        try:
            kind.model_validate(fields)
        except ValidationError as error:
            raise ValueError(sentence_of(str(error), body)) from None


def _check_outputs(asked: dict[str, Any] | None) -> None:
    """Raise ValueError for an unknown field, and for none or several kinds of grammar."""
    if asked is None:
        return
    for name in asked:
        if name not in OF_OUTPUTS:
            raise ValueError(
                f"structured_outputs has no field {shown(name)}"
                f"{did_you_mean(name, OF_OUTPUTS)}; known: {', '.join(OF_OUTPUTS)}."
            )
    given = [name for name in KINDS if asked.get(name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"structured_outputs needs one of {', '.join(KINDS)}, got "
            f"{' and '.join(given) or 'none'}."
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
