"""Answer chat and completion requests that have our fields.

vLLM's own handlers do the work, and answer every request without our fields by themselves.
"""

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from vllm.entrypoints.openai.chat_completion import api_router as chat_router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import api_router as completion_router
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)

from dllm_plugin.api.answers import (
    FIELD,
    Body,
    Endpoints,
    Reply,
    answer,
    as_response,
    encoder,
    endpoints,
    refusal,
)
from dllm_plugin.api.chosen import fill
from dllm_plugin.api.request_fields import read_fields
from dllm_plugin.api.suffixes import FillRequest, place_suffix
from dllm_plugin.config.request.arguments import STATISTICS

router = APIRouter()
CHECKS = [Depends(validate_json_request)]


@router.post("/v1/chat/completions", dependencies=CHECKS)
async def create_chat_completion(
    request: ChatCompletionRequest, raw_request: Request
) -> Response:
    """Answer a chat request, by vLLM's own route unless it asks for something of ours."""
    ours = endpoints(raw_request)
    if ours is None or not ours.is_asked(request):
        _silence(ours, request)
        return await chat_router.create_chat_completion(request, raw_request)
    return await _answer(request, raw_request)


@router.post("/v1/completions", dependencies=CHECKS)
async def create_completion(request: FillRequest, raw_request: Request) -> Response:
    """Answer a completion request, by vLLM's own route unless it asks for something of ours."""
    ours = endpoints(raw_request)
    if ours is None or not (ours.is_asked(request) or request.suffix is not None):
        _silence(ours, request)
        return await completion_router.create_completion(request, raw_request)
    return await _answer(request, raw_request)


def _silence(ours: Endpoints | None, request: Body) -> None:
    """Suppress vLLM's per-position histogram by default."""
    if ours is not None:
        request.vllm_xargs = {STATISTICS: 0} | (request.vllm_xargs or {})


@with_cancellation
@load_aware_call
async def _answer(request: Body, raw_request: Request) -> Response:
    """Let a copy of vLLM's handler answer, whose engine is watched."""
    return as_response(await reply_to(request, raw_request), raw_request)


async def reply_to(request: Body, raw_request: Request) -> Reply:
    """Return the reply to a request, which may have a suffix."""
    asked = request.model_extra or {}
    try:
        fields = (
            read_fields(asked[FIELD], bool(request.stream)) if FIELD in asked else None
        )
        lengths = None if fields is None else fields.lengths
        if isinstance(request, CompletionRequest) and request.suffix is not None:
            suffix, request.suffix = request.suffix, None
            if suffix:
                ours = endpoints(raw_request)
                assert ours is not None
                choices = place_suffix(
                    request, suffix, lengths, encoder(raw_request), ours.config
                )
                return (await fill(request, choices, raw_request, fields))[0]
        if lengths is not None:
            raise ValueError("diffusion.lengths needs a suffix.")
    except ValueError as error:
        return refusal(str(error), param=FIELD)
    return (await answer(request, raw_request, fields))[0]
