"""Answer POST /v1/likelihood: every forward of an estimate is one completion request.

A request's template masks some tokens of the text, and its targets say which ones they must take.
vLLM's own handler serves it, and batches it with all others.
"""

import asyncio
import copy
from collections.abc import Awaitable, Iterable
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
)
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.utils import random_uuid

from dllm_plugin.api.counts import total
from dllm_plugin.api.likelihood import Sample, estimate
from dllm_plugin.api.likelihood_request import LikelihoodRequest, Text, plan, read_pairs
from dllm_plugin.api.routes import as_response, endpoints
from dllm_plugin.api.viewer import not_ours
from dllm_plugin.api.watched_engine import WatchedEngine
from dllm_plugin.config.options import FILL, TARGETS, TEMPLATE
from dllm_plugin.config.reporting import STATISTICS
from dllm_plugin.config.template import no_template, read_template

router = APIRouter()


class Refused(Exception):
    """Carry the reply of a request that vLLM refused."""

    def __init__(self, reply: ErrorResponse) -> None:
        super().__init__(reply.error.message)
        self.reply = reply


class Scorer:
    """Ask the handler for the forwards of one call, as many at a time as run in a batch."""

    def __init__(
        self, handler: OpenAIServingCompletion, model: str | None, most: int, raw_request: Request
    ) -> None:
        self.handler = handler
        self.model = model
        self.raw_request = raw_request
        self.slots = asyncio.Semaphore(most)

    async def logprobs(self, text: Text, sample: Sample) -> list[float]:
        """Return the log-probabilities of the tokens that a sample masks."""
        targets = [text.continuation[place] for place in sample.masked]
        arguments = {TEMPLATE: masked(text, sample.masked), TARGETS: targets}
        choice = await self._complete(text, sample.masked[-1] + 1, arguments)
        assert choice.logprobs is not None
        scored = choice.logprobs.token_logprobs
        return [score for place in sample.masked if (score := scored[place]) is not None]

    async def is_greedy(self, text: Text) -> bool:
        """Return whether a decode of one token a forward writes the continuation."""
        length = len(text.continuation)
        arguments = {TEMPLATE: [FILL] * length, "dllm_policy": "low_confidence"}
        choice = await self._complete(text, length, arguments | {"dllm_steps": length})
        return bool(choice.token_ids == text.continuation)

    async def _complete(
        self, text: Text, max_tokens: int, arguments: dict[str, Any]
    ) -> CompletionResponseChoice:
        request = CompletionRequest(
            model=self.model,
            prompt=text.context,
            max_tokens=max_tokens,
            temperature=0,
            seed=None,
            ignore_eos=True,
            logprobs=0,
            return_token_ids=True,
            vllm_xargs=arguments | {STATISTICS: 1},
        )
        async with self.slots:
            reply = await self.handler.create_completion(request, self.raw_request)
        if isinstance(reply, ErrorResponse):
            raise Refused(reply)
        assert isinstance(reply, CompletionResponse), "not a stream"
        [choice] = reply.choices
        return choice


def masked(text: Text, places: Iterable[int]) -> list[int]:
    """Return the continuation as a template."""
    template = list(text.continuation)
    for place in places:
        template[place] = FILL
    return template


async def together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all calls; the first that fails, or the reader's leaving, ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@router.post("/v1/likelihood", dependencies=[Depends(validate_json_request)])
@with_cancellation
@load_aware_call
async def create_likelihood(request: LikelihoodRequest, raw_request: Request) -> Response:
    """Answer with the log-likelihood of each continuation behind its context."""
    state, ours = raw_request.app.state, endpoints(raw_request)
    if ours is None:
        return not_ours()
    handler = copy.copy(state.openai_serving_completion)
    engine = WatchedEngine(ours.engine, ours.tracing, strips=True)
    handler.engine_client = engine
    most = ours.engine.vllm_config.scheduler_config.max_num_seqs
    scorer = Scorer(handler, request.model, most, raw_request)
    try:
        if refusal := no_template(ours.config, "likelihood"):
            raise ValueError(refusal)
        texts = await read_pairs(request, handler.renderer)
        for text in texts:
            read_template(ours.config, {TEMPLATE: [FILL] * len(text.continuation)})
        samples = plan(request, texts)
        scored, greedy = await together(
            (
                together(
                    scorer.logprobs(text, one)
                    for text, of_text in zip(texts, samples, strict=True)
                    for one in of_text
                ),
                together(scorer.is_greedy(text) for text in texts if request.greedy),
            )
        )
    except ValueError as error:
        return as_response(handler.create_error_response(error), raw_request)
    except Refused as error:
        return as_response(error.reply, raw_request)
    return JSONResponse(reply_to(request, texts, samples, scored, greedy, engine))


def reply_to(
    request: LikelihoodRequest,
    texts: list[Text],
    samples: list[list[Sample]],
    scored: list[list[float]],
    greedy: list[bool],
    engine: WatchedEngine,
) -> dict[str, Any]:
    """Return the reply of a call whose forwards are all there."""
    results, rest = [], iter(scored)
    for place, (text, of_text) in enumerate(zip(texts, samples, strict=True)):
        found = estimate(request.method, of_text, [next(rest) for _ in of_text])
        counts = {"tokens": len(text.continuation), "samples": len(of_text)}
        matches = {"greedy": greedy[place] if request.greedy else None}
        results.append(found._asdict() | counts | matches)
    num_tokens = sum(len(text.context) + len(text.continuation) for text in texts)
    took = total(list(engine.counts.values())).as_json()
    return {
        "id": f"likelihood-{random_uuid()}",
        "object": "likelihood",
        "model": request.model,
        "results": results,
        "usage": {
            "prompt_tokens": num_tokens,
            "completion_tokens": 0,
            "total_tokens": num_tokens,
        },
        "metrics": {"diffusion": {name: took[name] for name in ("forwards", "computed_positions")}},
    }
