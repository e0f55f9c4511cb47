"""Answer POST /v1/likelihood: estimate the log-likelihood of texts.

A model of this kind predicts masked tokens from all others, so a text has no chain of conditional
probabilities to read off one forward. Each forward of an estimate masks some tokens of a text, and
is one completion request, which vLLM's own handler serves and batches with all others. Shape
letters: S samples, L tokens of the text.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr, model_validator
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.utils import random_uuid

from dllm_plugin.config.request.checks import check_length, no_template
from dllm_plugin.config.validation import did_you_mean, shown
from dllm_plugin.infilling.gaps import beginning
from dllm_plugin.infilling.lengths import Scoring

from .answers import as_response, endpoints, not_ours
from .scorer import Refused, Scorer, together
from .watched_engine import total


class Text(NamedTuple):
    """Store the token ids of a text whose end is scored."""

    context: list[int]
    continuation: list[int]


class Sample(NamedTuple):
    """Describe one forward of an estimate.

    masked   positions that are masks, ascending
    counted  how many of them count, from the first on
    weight   factor of the sum of their log-probabilities
    """

    masked: tuple[int, ...]
    counted: int
    weight: float


class Estimate(NamedTuple):
    """Store a log-likelihood; the error is None if the method does not sample."""

    logprob: float
    standard_error: float | None


def mask_counts(length: int, samples: int, first: int) -> list[int]:
    """Return how many of `length` tokens each sample masks: LLaDA's even spread over 1..length.

    Args:
        first: masks of the first sample; the others follow at equal distances, round and round.
    """
    last = first + (samples - 1) * (length / samples)
    # In float32, which decides how LLaDA's own estimate rounds halves.
    spread_S = torch.linspace(float(first), last, steps=samples).round().long()
    return [(count - 1) % length + 1 for count in spread_S.tolist()]


def monte_carlo(length: int, samples: int, seed: int) -> list[Sample]:
    """Mask a spread of counts, each at positions that the seed and the sample's number choose."""
    if length == 1:
        return [Sample((0,), 1, 1.0)]
    first = int(np.random.default_rng(seed).integers(1, length + 1))
    drawn = []
    for number, count in enumerate(mask_counts(length, samples, first)):
        order_L = np.random.default_rng((seed, number)).permutation(length)
        drawn.append(
            Sample(tuple(sorted(order_L[:count].tolist())), count, length / count)
        )
    return drawn


def pseudo(length: int, samples: int, seed: int) -> list[Sample]:
    """Mask one token at a time: the pseudo-log-likelihood."""
    return [Sample((place,), 1, 1.0) for place in range(length)]


def left_to_right(length: int, samples: int, seed: int) -> list[Sample]:
    """Mask each token and all after it: the chain rule in the order of the text."""
    return [Sample(tuple(range(place, length)), 1, 1.0) for place in range(length)]


METHODS: dict[str, Callable[[int, int, int], list[Sample]]] = {
    "monte_carlo": monte_carlo,
    "pseudo": pseudo,
    "left_to_right": left_to_right,
}


def estimate(
    method: str, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]
) -> Estimate:
    """Return the estimate of one text.

    Args:
        logprobs: of each sample's masked tokens, in their order.
    """
    pairs = zip(samples, logprobs, strict=True)
    values = [one.weight * math.fsum(scored[: one.counted]) for one, scored in pairs]
    if method != "monte_carlo":
        return Estimate(math.fsum(values), None)
    error = None
    if len(values) > 1:
        error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(math.fsum(values) / len(values), error)


MOST_SAMPLES, MOST_FORWARDS = 1024, 4096
SAMPLES, SEED = 128, 0  # of monte_carlo, where the call names none
MOST_SEED = 2**63 - 1


class Strict(BaseModel):
    """Describe an object without other fields."""

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, body: Any) -> Any:
        """Raise ValueError naming a field that is unknown, and the nearest one."""
        known = list(cls.model_fields)
        for name in body if isinstance(body, dict) else ():
            if name not in known:
                raise ValueError(
                    f"There is no field {shown(name)}{did_you_mean(name, known)}; known: "
                    f"{', '.join(known)}."
                )
        return body


TokenId = Annotated[StrictInt, Field(ge=0)]


class Pair(Strict):
    """Describe a text whose end is scored: both fields are texts, or both are token ids."""

    context: StrictStr | list[TokenId] = ""
    continuation: StrictStr | list[TokenId]


class LikelihoodRequest(Strict):
    """Describe the body of a call."""

    model: StrictStr | None = None
    pairs: list[Pair]
    method: StrictStr = "monte_carlo"
    samples: StrictInt | None = None
    seed: StrictInt | None = None
    greedy: StrictBool = False


def check_limits(request: LikelihoodRequest) -> None:
    """Raise ValueError naming the first field that is out of range or without effect."""
    if not request.pairs:
        raise ValueError(
            "pairs must hold at least one pair of context and continuation."
        )
    # Before their texts are read.
    check_forwards(len(request.pairs))
    if request.method not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"method must be one of {known}, got {shown(request.method)}.")
    for name, lowest, most in (("samples", 1, MOST_SAMPLES), ("seed", 0, MOST_SEED)):
        value = getattr(request, name)
        if value is None:
            continue
        if request.method != "monte_carlo":
            raise ValueError(
                f"{name} has no effect with method {request.method}, which draws nothing: leave "
                "it out."
            )
        if not lowest <= value <= most:
            raise ValueError(
                f"{name} must be from {lowest} to {most}, got {shown(value)}."
            )


def check_forwards(needed: int) -> None:
    """Raise ValueError for more forwards than the limit of a call."""
    if needed > MOST_FORWARDS:
        raise ValueError(
            f"This call needs {needed} forwards, at most {MOST_FORWARDS} are allowed: fewer "
            "samples or pairs."
        )


def plan(request: LikelihoodRequest, texts: list[Text]) -> list[list[Sample]]:
    """Return the samples of each text. Raises ValueError beyond the forwards of a call."""
    count = SAMPLES if request.samples is None else request.samples
    seed = SEED if request.seed is None else request.seed
    lengths = [len(text.continuation) for text in texts]
    if request.method == "monte_carlo":
        needed = sum(1 if length == 1 else count for length in lengths)
    else:
        needed = sum(lengths)
    check_forwards(needed + request.greedy * sum(lengths))
    return [METHODS[request.method](length, count, seed) for length in lengths]


async def read_pairs(request: LikelihoodRequest, renderer: Any) -> list[Text]:
    """Return the token ids of all pairs. Raises ValueError naming the pair that has none."""
    check_limits(request)
    texts = []
    for place, pair in enumerate(request.pairs):
        context = pair.context or type(pair.continuation)()
        continuation = pair.continuation
        if isinstance(context, str) and isinstance(continuation, str):
            text = await _tokenized(context, continuation, renderer)
        elif isinstance(context, list) and isinstance(continuation, list):
            text = Text(context, continuation)
        else:
            raise ValueError(
                f"pairs[{place}] mixes text and token ids: both must be of one kind."
            )
        if not text.continuation:
            raise ValueError(f"pairs[{place}].continuation holds no token.")
        if not text.context:
            text = text._replace(context=beginning(renderer.get_tokenizer()))
        texts.append(text)
    return texts


async def _tokenized(context: str, continuation: str, renderer: Any) -> Text:
    """Return the tokens of a text, cut where its context ends.

    Space at a context's end goes with the word after it, as tokenizers join them.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    whole = await _ids(kept + continuation, renderer)
    before = await _ids(kept, renderer)
    return Text(before, whole[len(before) :])


async def _ids(text: str, renderer: Any) -> list[int]:
    params = renderer.default_cmpl_tok_params
    prompt = await renderer.tokenize_prompt_async({"prompt": text}, params)
    return list(prompt["prompt_token_ids"])


router = APIRouter()


@router.post("/v1/likelihood", dependencies=[Depends(validate_json_request)])
@with_cancellation
@load_aware_call
async def create_likelihood(
    request: LikelihoodRequest, raw_request: Request
) -> Response:
    """Answer with the log-likelihood of each continuation after its context."""
    ours = endpoints(raw_request)
    if ours is None:
        return not_ours()
    most = ours.engine.vllm_config.scheduler_config.max_num_seqs
    scorer = Scorer(raw_request, ours, request.model, most)
    try:
        if refused := no_template(ours.config, "likelihood"):
            raise ValueError(refused)
        texts = await read_pairs(request, scorer.handler.renderer)
        for text in texts:
            check_length(ours.config, len(text.continuation))
        samples = plan(request, texts)
        calls = []
        for text, of_text in zip(texts, samples, strict=True):
            calls.append(_result(request, scorer, text, of_text))
        results = await together(calls)
    except ValueError as error:
        return as_response(scorer.handler.create_error_response(error), raw_request)
    except Refused as error:
        return as_response(error.reply, raw_request)
    num_tokens = sum(len(text.context) + len(text.continuation) for text in texts)
    took = total(list(scorer.engine.counts.values()))
    counts = {"forwards": took.forwards, "computed_positions": took.computed_positions}
    usage = {"prompt_tokens": num_tokens, "completion_tokens": 0}
    reply = {
        "id": f"likelihood-{random_uuid()}",
        "object": "likelihood",
        "model": request.model,
        "results": results,
        "usage": usage | {"total_tokens": num_tokens},
        "metrics": {"diffusion": counts},
    }
    return JSONResponse(reply)


async def _result(
    request: LikelihoodRequest, scorer: Scorer, text: Text, samples: list[Sample]
) -> dict[str, Any]:
    """Return the result of one text, from all its forwards."""
    calls: list[Awaitable[Any]] = []
    for one in samples:
        scoring = Scoring(text.continuation, one.masked)
        calls.append(scorer.logprobs(text.context, scoring))
    if request.greedy:
        calls.append(scorer.is_greedy(*text))
    scored = await together(calls)
    greedy = scored.pop() if request.greedy else None
    result = estimate(request.method, samples, scored)._asdict()
    counts = {"tokens": len(text.continuation), "samples": len(samples)}
    return result | counts | {"greedy": greedy}
