"""Answer chat and completion requests that ask for what only diffusion can show.

vLLM's own handlers do the work; a request that asks for nothing of ours is theirs alone.
"""

import copy
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion import api_router as chat_router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import api_router as completion_router
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from dllm_plugin.api.encoding import Encoder
from dllm_plugin.api.frame_stream import (
    CHAT_CHUNK,
    COMPLETION_CHUNK,
    FrameSource,
    with_frames,
)
from dllm_plugin.api.replies import add_counts, with_counts
from dllm_plugin.api.request_fields import Asked, read_fields
from dllm_plugin.api.suffixes import place_suffix
from dllm_plugin.api.watched_engine import WatchedEngine
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.reporting import STATISTICS
from dllm_plugin.config.request import request_config

Body = ChatCompletionRequest | CompletionRequest
Reply = ErrorResponse | dict[str, Any] | AsyncGenerator[str, None]
FIELD = "diffusion"
router = APIRouter()


class Endpoints:
    """Hold what the routes need of a server whose model is a diffusion language model."""

    def __init__(self, engine: EngineClient, config: DecodeConfig, tracing: bool) -> None:
        self.engine = engine
        self.config = config
        self.tracing = tracing

    def is_asked(self, body: Body) -> bool:
        """Return whether a request is for us: it has our field, or every request is traced."""
        return FIELD in (body.model_extra or {}) or self.tracing

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return what makes tokens of texts."""
        return Encoder(tokenizer, self.engine.vllm_config.model_config.max_model_len)

    def method(self, body: Body) -> dict[str, str]:
        """Return by which strategy and policy a request is decoded."""
        request = request_config(self.config, body.vllm_xargs, body.max_tokens)
        return {"strategy": self.config.strategy, "policy": request.policy}


def endpoints(raw_request: Request) -> Endpoints | None:
    """Return the state that the plugin made; None if the served model is not ours."""
    found: Endpoints | None = raw_request.app.state.diffuplug
    return found


@router.post("/v1/chat/completions", dependencies=[Depends(validate_json_request)])
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """Answer a chat request, by vLLM's own route unless it asks for something of ours."""
    ours = endpoints(raw_request)
    if ours is None or not ours.is_asked(request):
        _silence(ours, request)
        return await chat_router.create_chat_completion(request, raw_request)
    return await _answer(request, raw_request)


@router.post("/v1/completions", dependencies=[Depends(validate_json_request)])
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """Answer a completion request, by vLLM's own route unless it asks for something of ours."""
    ours = endpoints(raw_request)
    if ours is None or not (ours.is_asked(request) or request.suffix is not None):
        _silence(ours, request)
        return await completion_router.create_completion(request, raw_request)
    return await _answer(request, raw_request)


def _silence(ours: Endpoints | None, request: Body) -> None:
    """Ask for no statistics with the reply, unless the request does: hundreds of zeros."""
    if ours is not None:
        request.vllm_xargs = {STATISTICS: 0} | (request.vllm_xargs or {})


@with_cancellation
@load_aware_call
async def _answer(request: Body, raw_request: Request) -> Response:
    """Let a copy of vLLM's handler answer, whose engine is watched."""
    return as_response(await reply_to(request, raw_request), raw_request)


async def reply_to(request: Body, raw_request: Request, given: Sequence[int] = ()) -> Reply:
    """Return what a copy of vLLM's handler replies, whose engine is watched.

    Args:
        given: token ids of the request's own template that are not filled.
    """
    state, ours = raw_request.app.state, endpoints(raw_request)
    assert ours is not None
    of_chat = isinstance(request, ChatCompletionRequest)
    handler = copy.copy(state.openai_serving_chat if of_chat else state.openai_serving_completion)
    if handler is None:
        raise NotImplementedError("The model does not support this API")
    asked, tokenizer = request.model_extra or {}, handler.renderer.get_tokenizer()
    shows = FIELD in asked
    try:
        fields = read_fields(asked[FIELD], bool(request.stream)) if shows else Asked()
        if isinstance(request, CompletionRequest) and request.suffix is not None:
            given = place_suffix(request, fields.lengths, ours.encoder(tokenizer), ours.config)
        elif fields.lengths is not None:
            raise ValueError("diffusion.lengths needs a suffix.")
        method = ours.method(request)
    except ValueError as error:
        refused: ErrorResponse = handler.create_error_response(str(error), param=FIELD)
        return refused
    arguments = request.vllm_xargs or {}
    frames = FrameSource(tokenizer.decode) if fields.every else None
    strips = not arguments.get(STATISTICS)
    engine = WatchedEngine(ours.engine, ours.tracing, strips, frames, fields.trace, given)
    request.vllm_xargs = arguments | fields.arguments()
    handler.engine_client = engine
    create = handler.create_chat_completion if of_chat else handler.create_completion
    reply = await create(request, raw_request)
    if isinstance(reply, ErrorResponse):
        return reply
    if not request.stream:
        content: dict[str, Any] = reply.model_dump()
        return add_counts(content, engine, method) if shows else content
    events: AsyncGenerator[str, None] = with_counts(reply, engine, method) if shows else reply
    if frames is not None:
        kind = CHAT_CHUNK if of_chat else COMPLETION_CHUNK
        events = with_frames(events, frames, kind, request.model or handler.models.model_name())
    return events


def as_response(reply: Reply, raw_request: Request) -> Response:
    """Return what goes out over HTTP."""
    if isinstance(reply, ErrorResponse):
        return JSONResponse(reply.model_dump(), status_code=reply.error.code)
    if isinstance(reply, dict):
        headers = metrics_header(raw_request.headers.get("endpoint-load-metrics-format", ""))
        return JSONResponse(reply, headers=dict(headers) if headers else None)
    interval = float(raw_request.app.state.args.sse_keep_alive_interval)
    return StreamingResponse(with_sse_keep_alive(reply, interval), media_type="text/event-stream")
