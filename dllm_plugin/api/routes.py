"""Answer chat and completion requests that have our fields.

vLLM's own handlers do the work, and answer every request without our fields by themselves.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import model_validator
from vllm.entrypoints.openai.chat_completion import api_router as chat_router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import api_router as completion_router
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.arguments import STATISTICS
from dllm_plugin.config.request.checks import check_length, no_template
from dllm_plugin.infilling.gaps import AUTO, Gapped, Part
from dllm_plugin.infilling.lengths import canvas_positions, lengths_of, room_for_gaps

from .answers import (
    FIELD,
    Body,
    Encoder,
    Endpoints,
    Reply,
    answer,
    as_response,
    encoder,
    endpoints,
    our_endpoints,
    read_fields,
    refusal,
)
from .chosen import fill


class FillRequest(CompletionRequest):
    """Describe a completion request whose prompt may be empty if it has a suffix."""

    @model_validator(mode="before")
    @classmethod
    def allow_empty_prompt(cls, body: Any) -> Any:
        """Replace an empty text by no token ids, which vLLM's check of prompts accepts."""
        if isinstance(body, dict) and body.get("suffix") and body.get("prompt") == "":
            return body | {"prompt": []}
        return body


def place_suffix(
    request: CompletionRequest,
    suffix: str,
    asked: Any,
    encode: Encoder,
    config: DecodeConfig,
) -> list[Gapped]:
    """Return the prompt with each gap that is to be tried, and the suffix after it.

    Args:
        asked: lengths of the gap; None: `auto`.
    Raises:
        ValueError: naming what the request cannot have beside a suffix.
    """
    if refused := no_template(config, "suffix"):
        raise ValueError(refused)
    text = request.prompt or ""
    if not isinstance(text, str):
        raise ValueError(
            f"suffix needs one prompt of text, got a list of {len(text)}: send a string."
        )
    for name in ("echo", "use_beam_search", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise ValueError(f"{name} cannot be combined with suffix.")
    form = request.response_format
    if request.structured_outputs or (form is not None and form.type != "text"):
        raise ValueError(
            "response_format and structured_outputs cannot be combined with suffix."
        )
    if request.max_tokens is None:
        raise ValueError("suffix needs max_tokens, which bounds its gap: give it.")
    tail = encode(suffix)
    if config.family.suffix_ends:
        tail = [*tail, encode.tokenizer.eos_token_id]
    prompt = encode.first(text, special=request.add_special_tokens)
    room = room_for_gaps(config.canvas_length, encode.context - len(prompt), tail)
    fewest = max(request.min_tokens or 0, 1)
    lengths = lengths_of(
        AUTO if asked is None else asked, request.max_tokens, fewest, room
    )
    check_length(config, lengths[-1])
    choices = []
    for length in lengths:
        parts: list[Part] = [text, (length,), suffix]
        choices.append(Gapped(parts, prompt, [[FILL] * length, tail]))
    check_length(config, canvas_positions(choices))
    return choices


READY_SECONDS = 10.0  # for an engine's answer, between two steps
router = APIRouter()
CHECKS = [Depends(validate_json_request)]


@router.get("/ready")
async def ready(raw_request: Request) -> Response:
    """Return 200 if a request would be computed now; 503 if an engine rests or is silent."""
    client = raw_request.app.state.engine_client
    try:
        async with asyncio.timeout(READY_SECONDS):
            rests = client.errored or await client.is_sleeping()
    # The first is raised if only some engines sleep.
    except (RuntimeError, TimeoutError):
        rests = True
    return Response(status_code=503 if rests else 200)


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
    asked = (request.model_extra or {}).get(FIELD)
    try:
        fields, lengths = None, None
        if asked is not None:
            fields = read_fields(asked, bool(request.stream))
            lengths = fields.lengths
        if isinstance(request, CompletionRequest) and request.suffix is not None:
            suffix, request.suffix = request.suffix, None
            if suffix:
                encode = encoder(raw_request)
                config = our_endpoints(raw_request).config
                choices = place_suffix(request, suffix, lengths, encode, config)
                return (await fill(request, choices, raw_request, fields))[0]
        if lengths is not None:
            raise ValueError("diffusion.lengths needs a suffix.")
    except ValueError as error:
        return refusal(str(error), param=FIELD)
    return (await answer(request, raw_request, fields))[0]
