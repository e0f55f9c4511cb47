"""Let copies of vLLM's handlers answer requests, whose engine is watched."""

import copy
from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import Any

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

from dllm_plugin.api.frames import (
    CHAT_CHUNK,
    COMPLETION_CHUNK,
    FrameSource,
    with_frames,
)
from dllm_plugin.api.request_fields import Asked, Encoder
from dllm_plugin.api.watched_engine import WatchedEngine, add_counts, with_counts
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.request.arguments import STATISTICS
from dllm_plugin.config.request.parsing import request_arguments

Body = ChatCompletionRequest | CompletionRequest
Reply = ErrorResponse | dict[str, Any] | AsyncGenerator[str, None]
FIELD = "diffusion"
NOT_OURS = "This server's model is no diffusion language model."


class Endpoints:
    """Store what the routes need of a server of a diffusion language model."""

    def __init__(
        self, engine: EngineClient, config: DecodeConfig, tracing: bool
    ) -> None:
        self.engine = engine
        self.config = config
        self.tracing = tracing

    def is_asked(self, body: Body) -> bool:
        """Return whether our route answers a request.

        It has our field, or a grammar, which may be refused while it is compiled, or every request
        is traced.
        """
        return FIELD in (body.model_extra or {}) or _has_grammar(body) or self.tracing

    def ends(self, encode: Encoder) -> set[int]:
        """Return the tokens that end the text of a gap."""
        return {encode.tokenizer.eos_token_id, *self.config.turn_end_token_ids}

    def method(self, body: Body) -> dict[str, str]:
        """Return the strategy and the policy of a request."""
        asked = request_arguments(self.config, body.vllm_xargs, body.max_tokens)
        return {"strategy": self.config.strategy, "policy": asked.policy}


def _has_grammar(body: Body) -> bool:
    """Return whether the body has a grammar, or tools that may bring one."""
    form = body.response_format
    if body.structured_outputs is not None or (
        form is not None and form.type != "text"
    ):
        return True
    return isinstance(body, ChatCompletionRequest) and bool(body.tools)


def endpoints(raw_request: Request) -> Endpoints | None:
    """Return the state that the plugin made; None if the served model is not ours."""
    found: Endpoints | None = raw_request.app.state.diffuplug
    return found


def encoder(raw_request: Request) -> Encoder:
    """Return the encoder of texts."""
    ours = endpoints(raw_request)
    assert ours is not None
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
    state, ours = raw_request.app.state, endpoints(raw_request)
    assert ours is not None
    of_chat = isinstance(request, ChatCompletionRequest)
    handler = copy.copy(
        state.openai_serving_chat if of_chat else state.openai_serving_completion
    )
    if handler is None:
        raise NotImplementedError("The model does not support this API")
    shows, asked = fields is not None, fields or Asked()
    arguments = request.vllm_xargs or {}
    frames = (
        FrameSource(handler.renderer.get_tokenizer().decode) if asked.every else None
    )
    strips = not arguments.get(STATISTICS)
    calls = False
    if isinstance(request, ChatCompletionRequest):
        calls = bool(request.stream and request.tools)
    engine = WatchedEngine(
        ours.engine, ours.tracing, strips, frames, asked.trace, given, calls
    )
    try:
        method = ours.method(request)
    except ValueError as error:
        return refusal(str(error), param=FIELD), engine
    request.vllm_xargs = arguments | asked.arguments()
    handler.engine_client = engine
    create = handler.create_chat_completion if of_chat else handler.create_completion
    reply = await create(request, raw_request)
    if isinstance(reply, ErrorResponse):
        return reply, engine
    if not request.stream:
        content: dict[str, Any] = reply.model_dump()
        return (add_counts(content, engine, method) if shows else content), engine
    events: AsyncGenerator[str, None] = (
        with_counts(reply, engine, method) if shows else reply
    )
    if frames is not None:
        kind = CHAT_CHUNK if of_chat else COMPLETION_CHUNK
        events = with_frames(
            events, frames, kind, request.model or handler.models.model_name()
        )
    return events, engine


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
