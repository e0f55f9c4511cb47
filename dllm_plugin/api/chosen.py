"""Fill gaps whose length is chosen: decode each length, score it, and reply with the best."""

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from fastapi import Request
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.exceptions import VLLMValidationError

from dllm_plugin.config.request.arguments import EARLY_TEXT, TEMPLATE
from dllm_plugin.infilling.gaps import Gapped, filled
from dllm_plugin.infilling.lengths import best_of, score_of, scoring_of, told

from .answers import FIELD, Asked, Reply, answer, encoder, our_endpoints, refusal
from .frames import END, EVENT, event_of
from .scorer import Refused, Scorer, check_ended, together
from .watched_engine import Counts, WatchedEngine, total

# Fields of a whole reply's choice that a stream has, too.
OF_STREAM = (
    *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids"),
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
        check_gaps(choices, raw_request)
        if len(choices) > 1:
            check(request, fields)
    except ValueError as error:
        return refusal(str(error)), choices[0]
    try:
        if len(choices) == 1:
            reply, _ = await _answered(request, choices[0], raw_request, fields)
            return reply, choices[0]
        return await _best(request, choices, raw_request, fields)
    except Refused as error:
        return error.reply, choices[0]


def check_arguments(request: CompletionRequest) -> None:
    """Raise ValueError for a template in a request with gaps, which make a template."""
    if TEMPLATE in (request.vllm_xargs or {}):
        raise ValueError(
            f"{TEMPLATE} cannot be combined with suffix or gaps: leave it out."
        )


def check_gaps(choices: list[Gapped], raw_request: Request) -> None:
    """Raise ValueError for gaps that fit no context, and a mask in the text around them.

    The engine would name the template, which the body does not have.
    """
    ours, context = our_endpoints(raw_request), encoder(raw_request).context
    mask = ours.config.mask_token_id
    for gapped in choices:
        num_prompt, positions = len(gapped.prompt), len(gapped.template)
        if num_prompt + positions > context:
            raise ValueError(
                f"The prompt has {num_prompt} tokens and the gaps and what follows them "
                f"{positions} positions, but the context holds {context}: shorten one of them "
                "or raise max_model_len."
            )
        if mask in gapped.template:
            raise ValueError(
                f"The text around the gaps holds the mask token (id {mask}): remove it."
            )


def check(request: CompletionRequest, fields: Asked | None) -> None:
    """Raise ValueError naming what excludes a choice of lengths."""
    if request.n < 1 or (request.n > 1 and request.temperature == 0):
        raise ValueError(
            f"n must be 1 at temperature 0, and at least 1 above it, got {request.n}."
        )
    fields = fields or Asked()
    arguments = request.vllm_xargs or {}
    reported = {
        "diffusion.frames": fields.every,
        "diffusion.early_text": fields.early_text,
        EARLY_TEXT: arguments.get(EARLY_TEXT),
    }
    for name, asked in reported.items():
        if asked:
            raise ValueError(f"{name} needs one length: give it as an integer.")


async def _answered(
    request: CompletionRequest,
    gapped: Gapped,
    raw_request: Request,
    fields: Asked | None,
) -> tuple[Reply, WatchedEngine]:
    """Return the reply with one choice of lengths, and the engine that counted it.

    Raises Refused for an error, and for an answer that the server cut off.
    """
    arguments: dict[str, Any] = (request.vllm_xargs or {}) | {TEMPLATE: gapped.template}
    # Not through pydantic, which would read each of the ids.
    changes = {
        "prompt": gapped.prompt,
        "max_tokens": gapped.end,
        "vllm_xargs": arguments,
    }
    one = request.model_copy(update=changes)
    try:
        reply, engine = await answer(one, raw_request, fields, gapped.given)
    except VLLMValidationError as error:
        raise ValueError(_of_gaps(str(error.args[0]))) from error
    if isinstance(reply, ErrorResponse):
        reply.error.message = _of_gaps(reply.error.message)
        raise Refused(reply)
    for choice in reply["choices"] if isinstance(reply, dict) else ():
        check_ended(choice["finish_reason"])
    return reply, engine


def _of_gaps(sentence: str) -> str:
    """Return a sentence with what the body has in place of the template."""
    return sentence.replace(TEMPLATE, "the gaps and what follows them")


class _Attempt(NamedTuple):
    """Store the reply with one choice of lengths, its score, and what it took."""

    reply: dict[str, Any]
    score: float
    counts: list[Counts]


async def _best(
    request: CompletionRequest,
    choices: list[Gapped],
    raw_request: Request,
    fields: Asked | None,
) -> tuple[Reply, Gapped]:
    """Return the best reply, and its choice of lengths."""
    ours = our_endpoints(raw_request)
    encode = encoder(raw_request)
    ends = ours.ends(encode)
    scorer = Scorer(raw_request, ours, request.model, len(choices), request.priority)
    changes = {
        "n": 1,
        "stream": False,
        "stream_options": None,
        "return_token_ids": True,
        "logprobs": request.logprobs or 0,
    }
    whole = request.model_copy(update=changes)

    async def attempt(gapped: Gapped) -> _Attempt:
        reply, engine = await _answered(whole, gapped, raw_request, fields)
        assert isinstance(reply, dict), "no stream was asked for"
        [choice] = reply["choices"]
        gaps = filled(gapped, choice["token_ids"], ends, encode.decode)
        scoring = scoring_of(gapped, gaps)
        of_tail = await scorer.logprobs(gapped.prompt, scoring)
        score = score_of(gaps, choice["logprobs"]["token_logprobs"], of_tail)
        return _Attempt(reply, score, list(engine.counts.values()))

    try:
        attempts = await together(map(attempt, choices))
    except ValueError as error:
        return refusal(str(error)), choices[0]
    scores = [one.score for one in attempts]
    best = best_of(scores)
    reply: dict[str, Any] = attempts[best].reply
    counts = list(scorer.engine.counts.values())
    for one in attempts:
        counts += one.counts
    if request.n != 1:  # all with the length of the best text
        several = whole.model_copy(update={"n": request.n})
        found, engine = await _answered(several, choices[best], raw_request, fields)
        assert isinstance(found, dict), "no stream was asked for"
        reply = found
        counts += engine.counts.values()
    for choice in reply["choices"]:
        if request.logprobs is None:
            choice["logprobs"] = None
        if not request.return_token_ids:
            choice["token_ids"] = choice["prompt_token_ids"] = None
        choice[FIELD] = choice.get(FIELD, {}) | {"lengths": told(choices, scores)}
    if fields is not None:
        reply["metrics"][FIELD] |= total(counts).as_json()
    if not request.stream:
        return reply, choices[best]
    forced = raw_request.app.state.openai_serving_completion.enable_force_include_usage
    return in_one_piece(reply, request, forced), choices[best]


async def in_one_piece(
    reply: dict[str, Any], request: CompletionRequest, forced: bool
) -> AsyncGenerator[str, None]:
    """Yield a whole reply as a stream.

    Args:
        forced: the server adds usage to every stream.
    """
    at_end, every = should_include_usage(request.stream_options, forced)
    head = {name: reply[name] for name in ("id", "object", "created", "model")}
    usage = {"usage": reply["usage"]}
    for choice in reply["choices"]:
        text = {name: choice[name] for name in OF_STREAM}
        yield event_of(head | {"choices": [text]} | (usage if every else {}))
    if at_end:
        metrics = {"metrics": reply["metrics"]} if reply["metrics"] else {}
        yield event_of(head | {"choices": []} | usage | metrics)
    yield f"{EVENT}{END}\n\n"
