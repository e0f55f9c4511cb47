"""Fill gaps whose length is chosen: decode each length, score it, and reply with the best."""

import copy
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import should_include_usage

from dllm_plugin.api.answers import FIELD, Reply, answer, encoder, endpoints, refusal
from dllm_plugin.api.counts import Counts, total
from dllm_plugin.api.request_fields import Asked
from dllm_plugin.api.scorer import Refused, Scorer, Text, check_ended, together
from dllm_plugin.api.watching.watched_engine import WatchedEngine
from dllm_plugin.config.request.arguments import EARLY_TEXT, FRAMES, TEMPLATE
from dllm_plugin.config.validation import shown
from dllm_plugin.infilling.gaps import Gapped, filled
from dllm_plugin.infilling.lengths import best_of, score_of, scoring_of, told

# Fields of a whole reply's choice that a stream has, too.
OF_STREAM = (
    "index",
    "text",
    "logprobs",
    "finish_reason",
    "stop_reason",
    "token_ids",
    FIELD,
)


async def fill(
    request: CompletionRequest,
    choices: list[Gapped],
    raw_request: Request,
    fields: Asked | None,
) -> tuple[Reply, Gapped]:
    """Return the reply, and the choice of lengths that it fills."""
    try:
        check_arguments(request)
        if len(choices) > 1:
            check(request, fields)
    except ValueError as error:
        return refusal(str(error)), choices[0]
    if len(choices) == 1:
        return await _alone(request, choices[0], raw_request, fields), choices[0]
    try:
        return await _best(request, choices, raw_request, fields)
    except ValueError as error:
        return refusal(str(error)), choices[0]
    except Refused as error:
        return error.reply, choices[0]


def check_arguments(request: CompletionRequest) -> None:
    """Raise ValueError for a template beside gaps, which make one."""
    if TEMPLATE in (request.vllm_xargs or {}):
        raise ValueError(
            f"{TEMPLATE} cannot be combined with suffix or gaps: leave it out."
        )


def check(request: CompletionRequest, fields: Asked | None) -> None:
    """Raise ValueError naming what excludes a choice of lengths."""
    if request.n != 1:
        raise ValueError(
            f"n must be 1 where a length is chosen, got {shown(request.n)}: give "
            "diffusion.lengths, or on /v1/infill each gap, as an integer."
        )
    for name, asked in zip(
        ("frames", "early_text"), (fields or Asked())[:2], strict=True
    ):
        if asked:
            raise ValueError(
                f"diffusion.{name} needs one length: give it as an integer."
            )
    for name in (FRAMES, EARLY_TEXT):
        if (request.vllm_xargs or {}).get(name):
            raise ValueError(f"{name} needs one length: give it as an integer.")


async def _alone(
    request: CompletionRequest,
    gapped: Gapped,
    raw_request: Request,
    fields: Asked | None,
) -> Reply:
    reply, _ = await answer(
        _of_length(request, gapped), raw_request, fields, gapped.given
    )
    try:
        _check_ended(reply)
    except Refused as error:
        return error.reply
    return reply


async def _best(
    request: CompletionRequest,
    choices: list[Gapped],
    raw_request: Request,
    fields: Asked | None,
) -> tuple[Reply, Gapped]:
    changes = {"stream": False, "stream_options": None, "return_token_ids": True}
    whole = request.model_copy(update=changes | {"logprobs": request.logprobs or 0})
    attempts = await together(
        _decoded(whole, one, raw_request, fields) for one in choices
    )
    scores, counts = await _scores(
        request, choices, [a for a, _ in attempts], raw_request
    )
    best = best_of(scores)
    reply: dict[str, Any] = attempts[best][0]
    [choice] = reply["choices"]
    if request.logprobs is None:
        choice["logprobs"] = None
    if not request.return_token_ids:
        choice["token_ids"] = choice["prompt_token_ids"] = None
    choice[FIELD] = choice.get(FIELD, {}) | {"lengths": told(choices, scores)}
    if fields is not None:
        counts += [one for _, engine in attempts for one in engine.counts.values()]
        reply["metrics"][FIELD] |= total(counts).as_json()
    if not request.stream:
        return reply, choices[best]
    forced = raw_request.app.state.openai_serving_completion.enable_force_include_usage
    return in_one_piece(reply, request, forced), choices[best]


def _of_length(request: CompletionRequest, gapped: Gapped) -> CompletionRequest:
    arguments: dict[str, Any] = (request.vllm_xargs or {}) | {TEMPLATE: gapped.template}
    # Not through pydantic, which would read each of the ids.
    changes = {
        "prompt": gapped.prompt,
        "max_tokens": gapped.end,
        "vllm_xargs": arguments,
    }
    return request.model_copy(update=changes)


async def _decoded(
    request: CompletionRequest,
    gapped: Gapped,
    raw_request: Request,
    fields: Asked | None,
) -> tuple[dict[str, Any], WatchedEngine]:
    one = _of_length(request, gapped)
    reply, engine = await answer(one, raw_request, fields, gapped.given)
    if isinstance(reply, ErrorResponse):
        raise Refused(reply)
    assert isinstance(reply, dict), "no stream was asked for"
    _check_ended(reply)
    return reply, engine


def _check_ended(reply: Reply) -> None:
    for choice in reply["choices"] if isinstance(reply, dict) else ():
        check_ended(choice["finish_reason"])


async def _scores(
    request: CompletionRequest,
    choices: list[Gapped],
    replies: list[dict[str, Any]],
    raw_request: Request,
) -> tuple[list[float], list[Counts]]:
    """Return the score of each choice, and the cost of its forwards."""
    ours, encode = endpoints(raw_request), encoder(raw_request)
    assert ours is not None
    handler = copy.copy(raw_request.app.state.openai_serving_completion)
    engine = WatchedEngine(ours.engine, ours.tracing, strips=True)
    handler.engine_client = engine
    scorer = Scorer(handler, request.model, len(choices), raw_request, request.priority)
    ends = ours.ends(encode)
    answers = [reply["choices"][0] for reply in replies]
    fills = [
        filled(gapped, one["token_ids"], ends, encode.decode)
        for gapped, one in zip(choices, answers, strict=True)
    ]

    async def of_tail(gapped: Gapped, place: int) -> list[float]:
        scoring = scoring_of(gapped, fills[place])
        if not scoring.places:
            return []
        return await scorer.logprobs(Text(gapped.prompt, scoring.text), scoring.places)

    tails = await together(
        of_tail(gapped, place) for place, gapped in enumerate(choices)
    )
    scores = [
        score_of(gaps, one["logprobs"]["token_logprobs"], tail)
        for gaps, one, tail in zip(fills, answers, tails, strict=True)
    ]
    return scores, list(engine.counts.values())


async def in_one_piece(
    reply: dict[str, Any], request: CompletionRequest, forced: bool
) -> AsyncGenerator[str, None]:
    """Yield a whole reply as a stream.

    Args:
        forced: the server adds usage to every stream.
    """
    [choice] = reply["choices"]
    at_end, every = should_include_usage(request.stream_options, forced)
    head = {name: reply[name] for name in ("id", "object", "created", "model")}
    text = {name: choice[name] for name in OF_STREAM}
    usage = {"usage": reply["usage"]}
    yield _event(head | {"choices": [text]} | (usage if every else {}))
    if at_end:
        metrics = {"metrics": reply["metrics"]} if reply["metrics"] else {}
        yield _event(head | {"choices": []} | usage | metrics)
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
