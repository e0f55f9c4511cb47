"""Let copies of vLLM's handlers answer requests, whose engine is watched.

Read the field ``diffusion`` of a request body, and encode the texts of a request.
"""

import copy
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import REQUEST_PREFIX
from dllm_plugin.config.request.arguments import (
    ARGUMENTS,
    EARLY_TEXT,
    FRAMES,
    STATISTICS,
    TRACE,
)
from dllm_plugin.config.request.checks import check_characters
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.config.request.structured_outputs import at
from dllm_plugin.config.validation import shown
from dllm_plugin.infilling.gaps import beginning

from .frames import CHAT_CHUNK, COMPLETION_CHUNK, FrameSource, with_frames
from .watched_engine import WatchedEngine, add_counts, with_counts

Body = ChatCompletionRequest | CompletionRequest
Reply = ErrorResponse | dict[str, Any] | AsyncGenerator[str, None]
FIELD = "diffusion"
# Routes that read this field, and the one after which a suffix is read, too.
READ_BY = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/fim/completions",
    "/v1/infill",
)
SUFFIX_READ_BY = READ_BY[1:]
# Our arguments without their prefix, but those names that vLLM's requests have.
BARE = {name: f"{REQUEST_PREFIX}{name} in vllm_xargs" for name in ARGUMENTS}
for name in ("top_k", "top_p"):
    del BARE[name]
# Fields that vLLM ignores, and what to send in their place.
INSTEAD = BARE | {
    "frames": FIELD,
    "early_text": FIELD,
    "trace": FIELD,
    "extra_body": "its fields themselves",
    "extra_args": "vllm_xargs",
    "gen_length": "max_tokens",
    "remasking": "dllm_policy in vllm_xargs",
    "alg": "dllm_policy in vllm_xargs",
    "best_of": "n",
    "functions": "tools",
    "function_call": "tool_choice",
    "random_seed": "seed",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "json_schema": "response_format",
    "ebnf": "structured_outputs grammar",
    "regex": "structured_outputs regex",
    "grammar": "structured_outputs grammar",
    "guided_json": "structured_outputs json or response_format",
    "guided_regex": "structured_outputs regex",
    "guided_choice": "structured_outputs choice",
    "guided_grammar": "structured_outputs grammar",
}
EMPTY: tuple[Any, ...] = (None, "", [], {})
# Values that ask for nothing.
UNASKED = {"best_of": 1, "function_call": "none", "n_predict": -1}
# Fields of other routes.
OF_OTHERS = {
    "/v1/completions": {"max_completion_tokens": "max_tokens"},
    "/v1/fim/completions": {"max_completion_tokens": "max_tokens", "random_seed": ""},
    "/v1/messages": {
        "structured_outputs": "output_config",
        "response_format": "output_config",
        "output_format": "output_config",
    },
    "/v1/responses": {"response_format": "text", "max_tokens": "max_output_tokens"},
}
# Of these, what most bodies have.
COMMON = {"max_tokens", "max_completion_tokens"}
LOOKED_FOR = {FIELD, "suffix", *INSTEAD, *chain(*OF_OTHERS.values())} - COMMON
NOT_OURS = "This server's model is no diffusion language model."


class Asked(NamedTuple):
    """Store the fields of ``diffusion``; an empty object asks for counts.

    every    a frame every so many forwards; 0: none
    lengths  how many positions to fill before a suffix; None: max_tokens
    """

    every: int = 0
    early_text: bool = False
    trace: bool = False
    lengths: Any = None

    def arguments(self) -> dict[str, int]:
        """Return the engine's request arguments for this."""
        arguments = {STATISTICS: 1}
        if self.every:
            arguments[FRAMES] = self.every
        if self.early_text:
            arguments[EARLY_TEXT] = 1
        if self.trace:
            arguments[TRACE] = 1
        return arguments


FIELDS = ("early_text", "frames", "lengths", "trace")


def read_fields(body: Any, streams: bool) -> Asked:
    """Read the object. Raises ValueError with one sentence."""
    if not isinstance(body, dict):
        raise ValueError(f"diffusion must be an object, got {shown(body)}.")
    for name in sorted(set(body) - set(FIELDS)):
        raise ValueError(
            f"Unknown field {shown(name)} in diffusion; known: {', '.join(FIELDS)}."
        )
    every = _every(body.get("frames", False))
    early_text = _switch(body, "early_text")
    trace = _switch(body, "trace")
    for name, asked in (("frames", every), ("early_text", early_text)):
        if asked and not streams:
            raise ValueError(f'diffusion.{name} needs "stream": true.')
    return Asked(every, early_text, trace, body.get("lengths"))


def _switch(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"diffusion.{name} must be true or false, got {shown(value)}.")
    return value


def _every(frames: Any) -> int:
    if isinstance(frames, bool):
        return int(frames)
    if not isinstance(frames, dict) or set(frames) - {"every"}:
        raise ValueError(
            f'diffusion.frames must be true, false or {{"every": n}}, got {shown(frames)}.'
        )
    every = frames.get("every", 1)
    if isinstance(every, bool) or not isinstance(every, int):
        raise ValueError(
            f"diffusion.frames.every must be a whole number, got {shown(every)}."
        )
    if every < 1:
        raise ValueError(
            f"diffusion.frames.every must be at least 1, got {shown(every)}."
        )
    return every


@dataclass(frozen=True)
class Encoder:
    """Encode texts with a server's tokenizer, each as a part of a prompt."""

    tokenizer: Any
    context: int

    def __call__(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of a text that follows other text, if need be with special tokens."""
        # Other requests wait meanwhile, so nothing is encoded that cannot fit.
        fewest = len(text) // self.tokenizer.max_chars_per_token
        if fewest > self.context:
            raise ValueError(
                f"A text of {len(text)} characters has at least {fewest} tokens, but the context "
                f"holds {self.context}: shorten it."
            )
        check_characters("A text of the request", text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return ids

    def first(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a prompt; of an empty text the token that begins texts."""
        return self(text, special) or beginning(self.tokenizer)

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


class Endpoints(NamedTuple):
    """Store what the routes need of a server of a diffusion language model."""

    engine: EngineClient
    config: DecodeConfig
    tracing: bool

    def is_asked(self, body: Body) -> bool:
        """Return whether our route answers a request.

        It has our field, or is a stream that may call tools, or every request is traced.
        """
        return FIELD in (body.model_extra or {}) or may_call(body) or self.tracing

    def ends(self, encode: Encoder) -> set[int]:
        """Return the tokens that end the text of a gap."""
        return {encode.tokenizer.eos_token_id, *self.config.turn_end_token_ids}

    def method(self, body: Body) -> dict[str, str]:
        """Return the strategy and the policy of a request."""
        asked = request_arguments(self.config, body.vllm_xargs, body.max_tokens)
        return {"strategy": self.config.strategy, "policy": asked.policy}


def may_call(body: Body) -> bool:
    """Return whether the reply to a body is a stream that may call tools."""
    return isinstance(body, ChatCompletionRequest) and bool(body.stream and body.tools)


def endpoints(raw_request: Request) -> Endpoints | None:
    """Return the state that the plugin made; None if the served model is not ours."""
    found: Endpoints | None = raw_request.app.state.diffuplug
    return found


def our_endpoints(raw_request: Request) -> Endpoints:
    """Return the state that the plugin made, if the served model is ours."""
    found = endpoints(raw_request)
    assert found is not None
    return found


def encoder(raw_request: Request) -> Encoder:
    """Return the encoder of texts."""
    ours = our_endpoints(raw_request)
    tokenizer = raw_request.app.state.openai_serving_completion.renderer.get_tokenizer()
    return Encoder(tokenizer, ours.engine.vllm_config.model_config.max_model_len)


async def answer(
    request: Body, raw_request: Request, fields: Asked | None, given: Sequence[int] = ()
) -> tuple[Reply, WatchedEngine]:
    """Return the reply of a copy of vLLM's handler, and the engine that counted it.

    Args:
        fields: what the request asks for in its field of ours; None if it has none.
        given: token ids of the request's template that are not filled.
    """
    state = raw_request.app.state
    ours = our_endpoints(raw_request)
    asked = fields or Asked()
    arguments = request.vllm_xargs or {}
    strips = not arguments.get(STATISTICS)
    engine = WatchedEngine(ours.engine, ours.tracing, strips, None, asked.trace, given)
    try:
        method = ours.method(request)
    except ValueError as error:
        return refusal(str(error), param=FIELD), engine
    request.vllm_xargs = arguments | asked.arguments()
    if isinstance(request, ChatCompletionRequest):
        kind, handler = CHAT_CHUNK, copy.copy(state.openai_serving_chat)
        create = handler.create_chat_completion
        engine.calls = may_call(request)
    else:
        kind, handler = COMPLETION_CHUNK, copy.copy(state.openai_serving_completion)
        create = handler.create_completion
    handler.engine_client = engine
    if asked.every:
        engine.frames = FrameSource(handler.renderer.get_tokenizer().decode)
    reply = await create(request, raw_request)
    if isinstance(reply, ErrorResponse):
        return reply, engine
    if not request.stream:
        content: dict[str, Any] = reply.model_dump()
        if fields is not None:
            add_counts(content, engine, method)
        return content, engine
    if fields is not None:
        reply = with_counts(reply, engine, method)
    if engine.frames is not None:
        model = request.model or handler.models.model_name()
        reply = with_frames(reply, engine.frames, kind, model)
    return reply, engine


def has_common(body: bytes, path: str) -> bool:
    """Return whether a body may have a field that most routes read, and this one does not."""
    for route, others in OF_OTHERS.items():
        if path.endswith(route):
            return any(f'"{name}"'.encode() in body for name in COMMON & others.keys())
    return False


def check_fields(path: str, fields: dict[str, Any]) -> None:
    """Raise ValueError for a field of a body that a route would ignore."""
    if "/v1/" not in path and not path.endswith("/invocations"):
        return
    instead = INSTEAD
    for route, others in OF_OTHERS.items():
        if path.endswith(route):
            instead = INSTEAD | others
    said = fields
    if path.endswith(READ_BY[0]):  # chats read either name
        said = {"max_tokens": fields.get("max_completion_tokens")} | fields
    for name, value in fields.items():
        other = instead.get(name)
        asks = value not in EMPTY and value is not False and value != UNASKED.get(name)
        # Some clients send all names that any server has.
        if other and asks and value != said.get(other):
            raise ValueError(f"{name} {shown(value)} is not read here: send {other}.")
    if fields.get(FIELD) is not None and not path.endswith(READ_BY):
        raise ValueError(f"{FIELD} is not read here: send it to {READ_BY[0]}.")
    if fields.get("suffix") not in EMPTY and not path.endswith(SUFFIX_READ_BY):
        raise ValueError(f"suffix is not read here: send it to {SUFFIX_READ_BY[0]}.")
    arguments = at(fields, "vllm_xargs") or at(fields, "sampling_params", "extra_args")
    for name in arguments if isinstance(arguments, dict) else ():
        if name in BARE:
            raise ValueError(
                f"{name} is not read in vllm_xargs: send {REQUEST_PREFIX}{name}."
            )
    if value := at(arguments, FRAMES):
        raise ValueError(
            f'{FRAMES} {shown(value)} is for Python: send "{FIELD}": {{"frames": true}} to '
            f"{' or '.join(READ_BY[:2])}."
        )
    if at(arguments, EARLY_TEXT) and not fields.get("stream"):
        raise ValueError(f'{EARLY_TEXT} needs "stream": true.')


def refusal(
    sentence: str, code: int = HTTPStatus.BAD_REQUEST, param: str | None = None
) -> ErrorResponse:
    """Return the error reply to a request that cannot be honoured."""
    kind = "NotFoundError" if code == HTTPStatus.NOT_FOUND else "BadRequestError"
    return create_error_response(sentence, kind, HTTPStatus(code), param)


def not_ours() -> JSONResponse:
    """Return the reply of our routes if another model is served."""
    code = HTTPStatus.NOT_FOUND
    return JSONResponse(refusal(NOT_OURS, code).model_dump(), status_code=code)


def as_response(reply: Reply, raw_request: Request) -> Response:
    """Return a reply as an HTTP response."""
    if isinstance(reply, ErrorResponse):
        return JSONResponse(reply.model_dump(), status_code=reply.error.code)
    if isinstance(reply, dict):
        headers = metrics_header(
            raw_request.headers.get("endpoint-load-metrics-format", "")
        )
        return JSONResponse(reply, headers=dict(headers) if headers else None)
    interval = float(raw_request.app.state.args.sse_keep_alive_interval)
    return StreamingResponse(
        with_sse_keep_alive(reply, interval), media_type="text/event-stream"
    )
