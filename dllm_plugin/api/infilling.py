"""Fill gaps over HTTP: the FIM route of code editors, and any gaps of a text."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError, model_validator
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    with_cancellation,
)

from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.checks import check_length, no_template
from dllm_plugin.config.validation import shown
from dllm_plugin.infilling.gaps import Gapped, cut, filled, parts_of, together
from dllm_plugin.infilling.lengths import (
    canvas_positions,
    most_positions,
    place_each,
)

from .answers import (
    FIELD,
    Asked,
    Encoder,
    Endpoints,
    as_response,
    encoder,
    endpoints,
    not_ours,
    read_fields,
    refusal,
)
from .chosen import fill
from .frames import changed
from .routes import CHECKS, FillRequest, reply_to

router = APIRouter()
OF_INFILL = ("text", "parts", "messages", "draft", "rewrite", "slack")
# Fields of completions that this route has no use for; of the latter a stream has.
NO_EFFECT = (
    *("prompt", "suffix", "max_tokens", "echo", "use_beam_search"),
    *("add_special_tokens", "truncate_prompt_tokens"),
)
OF_WHOLE = ("logprobs", "return_token_ids")
Body = dict[str, Any]


class FimRequest(FillRequest):
    """Describe a FIM request: a completion, with a seed of another name."""

    random_seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, body: Any) -> Any:
        """Drop fields that are null: editors send null for what they leave open."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


@router.post("/v1/fim/completions", dependencies=CHECKS)
@with_cancellation
@load_aware_call
async def create_fim_completion(request: FimRequest, raw_request: Request) -> Response:
    """Fill the gap between a prompt and a suffix; without a suffix, complete the prompt."""
    if endpoints(raw_request) is None:
        return not_ours()
    seeds = {request.seed, request.random_seed} - {None}
    if len(seeds) > 1:
        said = f"seed {request.seed} and random_seed {request.random_seed} differ: send one."
        return as_response(refusal(said), raw_request)
    request.seed = next(iter(seeds), None)
    reply = await reply_to(request, raw_request)
    if isinstance(reply, dict):
        reply = _with_messages(reply, "message")
    elif not isinstance(reply, ErrorResponse):
        reply = _rewritten(reply, lambda chunk: _with_messages(chunk, "delta"))
    return as_response(reply, raw_request)


def _with_messages(body: Body, name: str) -> Body:
    """Add each choice's text as a message, the second form that clients read."""
    for choice in body.get("choices", ()):
        choice[name] = {"role": "assistant", "content": choice["text"]}
    return body


@router.post("/v1/infill", dependencies=CHECKS)
@with_cancellation
@load_aware_call
async def create_infill(body: Body, raw_request: Request) -> Response:
    """Fill the gaps of a text."""
    ours = endpoints(raw_request)
    if ours is None:
        return not_ours()
    try:
        request, choices, fields = await _read(body, ours, raw_request)
    except ValueError as error:
        return as_response(refusal(str(error)), raw_request)
    reply, gapped = await fill(request, choices, raw_request, fields)
    if isinstance(reply, dict):
        keeps = request.include_stop_str_in_output
        reply = _infilled(reply, gapped, ours, encoder(raw_request), keeps)
    elif not isinstance(reply, ErrorResponse):
        reply = _rewritten(reply, lambda chunk: chunk | {"object": "infill"})
    return as_response(reply, raw_request)


async def _read(
    body: Body, ours: Endpoints, raw_request: Request
) -> tuple[CompletionRequest, list[Gapped], Asked]:
    """Return vLLM's request, the choices of lengths, and our fields.

    Raises ValueError with one sentence.
    """
    if refused := no_template(ours.config, "infill"):
        raise ValueError(refused)
    encode = encoder(raw_request)
    parts = parts_of(body, encode)
    check_length(ours.config, most_positions(parts))
    _check_names(body)
    asked = body.get(FIELD)
    fields = read_fields({} if asked is None else asked, bool(body.get("stream")))
    if fields.lengths is not None:
        raise ValueError(
            "lengths has no effect on /v1/infill, where gaps name their own."
        )
    request = _completion(body)
    messages = body.get("messages")
    prompt = None if messages is None else await _prompt_of(messages, raw_request)
    canvas = ours.config.canvas_length
    context = encode.context
    choices = place_each(
        parts, prompt, encode.first, encode, canvas, context, request.min_tokens
    )
    check_length(ours.config, canvas_positions(choices))
    for name in ("stop", "stream"):
        if body.get(name) and choices[0].num_gaps > 1:
            raise ValueError(f"{name} needs a single gap, got {choices[0].num_gaps}.")
    return request, choices, fields


def _check_names(body: Body) -> None:
    """Raise ValueError naming a field without effect."""
    for name in NO_EFFECT:
        if body.get(name) is not None:
            raise ValueError(f"{name} has no effect on /v1/infill: leave it out.")
    for name in OF_WHOLE:
        if body.get(name) is not None and not body.get("stream"):
            raise ValueError(
                f'{name} has no effect on /v1/infill without "stream": true.'
            )


def _completion(body: Body) -> CompletionRequest:
    """Return vLLM's request, whose prompt follows."""
    asked: Body = {}
    for name, value in body.items():
        if name not in (*OF_INFILL, FIELD):
            asked[name] = value
    asked["prompt"] = [0]
    if not body.get("stream"):
        asked |= {"logprobs": 1, "return_token_ids": True}
    try:
        return CompletionRequest.model_validate(asked)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


async def _prompt_of(messages: Any, raw_request: Request) -> list[int]:
    """Return the token ids of messages by the chat template, up to the assistant's turn."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"messages must be a list of at least one message, got {shown(messages)}."
        )
    handler = raw_request.app.state.openai_serving_chat
    try:
        request = ChatCompletionRequest.model_validate({"messages": messages})
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    rendered = await handler.render_chat_request(request)
    if isinstance(rendered, ErrorResponse):
        raise ValueError(rendered.error.message)
    [prompt] = rendered[1]
    return list(prompt["prompt_token_ids"])


def _infilled(
    reply: Body, gapped: Gapped, ours: Endpoints, encode: Encoder, keeps: bool
) -> Body:
    """Return a reply in the form of this route."""
    ends = ours.ends(encode)
    choices, completed = [], 0
    for choice in reply["choices"]:
        gaps = filled(gapped, choice["token_ids"], ends, encode.decode)
        if isinstance(stop := choice["stop_reason"], str):
            gaps = [cut(gap, stop, keeps) for gap in gaps]
        scores = choice["logprobs"]["token_logprobs"]
        told = []
        for gap in gaps:
            of_gap = scores[gap.first : gap.first + len(gap.tokens)]
            mean = sum(of_gap) / len(of_gap) if of_gap else None
            told.append({"text": gap.text, "tokens": len(gap.tokens), "logprob": mean})
        if (trace := choice["diffusion"].get("trace")) is not None:
            trace["tokens"] = choice["logprobs"]["tokens"]
        completed += gapped.template[: len(choice["token_ids"])].count(FILL)
        choices.append(
            {
                "index": choice["index"],
                "text": together(gapped, gaps),
                "finish_reason": "stop",
                "gaps": told,
                "diffusion": choice["diffusion"],
            }
        )
    given = len(gapped.prompt) + len(gapped.given)
    usage = {"prompt_tokens": given, "completion_tokens": completed}
    return {
        "id": reply["id"].replace("cmpl", "infill"),
        "object": "infill",
        "created": reply["created"],
        "model": reply["model"],
        "choices": choices,
        "usage": usage | {"total_tokens": given + completed},
    }


async def _rewritten(
    events: AsyncGenerator[str, None], change: Callable[[Body], Body]
) -> AsyncGenerator[str, None]:
    """Yield a stream's events with every chunk changed."""
    async for event in events:
        yield changed(event, change)
