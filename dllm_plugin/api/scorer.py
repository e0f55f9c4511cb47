"""Ask vLLM's handler for forwards that score given tokens, each forward one request.

A request's template masks some tokens of a text, and its targets are what these must become.
"""

import asyncio
import copy
from collections.abc import Awaitable, Iterable
from http import HTTPStatus
from typing import Any

from fastapi import Request
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)

from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.arguments import STATISTICS, TARGETS, TEMPLATE
from dllm_plugin.infilling.lengths import Scoring

from .answers import Endpoints
from .watched_engine import WatchedEngine


class Refused(Exception):
    """Carry the reply of a request that was refused."""

    def __init__(self, reply: ErrorResponse) -> None:
        super().__init__(reply.error.message)
        self.reply = reply


def check_ended(finish_reason: str | None) -> None:
    """Raise Refused for an answer that the server cut off."""
    if finish_reason == "abort":
        sentence = "The server aborted this request before its answer was whole: send it again."
        busy = HTTPStatus.SERVICE_UNAVAILABLE
        raise Refused(create_error_response(sentence, "ServiceUnavailableError", busy))


def forward_request(
    model: str | None,
    prompt: list[int],
    max_tokens: int,
    arguments: dict[str, Any],
    priority: int,
) -> CompletionRequest:
    """Return the request of one forward."""
    return CompletionRequest(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        seed=None,
        ignore_eos=True,
        logprobs=0,
        return_token_ids=True,
        priority=priority,
        vllm_xargs=arguments | {STATISTICS: 1},
    )


class Scorer:
    """Request the forwards of one call, as many at a time as run in a batch.

    engine  counts the forwards
    """

    def __init__(
        self,
        raw_request: Request,
        ours: Endpoints,
        model: str | None,
        most: int,
        priority: int = 0,
    ) -> None:
        self.engine = WatchedEngine(ours.engine, ours.tracing, strips=True)
        self.handler = copy.copy(raw_request.app.state.openai_serving_completion)
        self.handler.engine_client = self.engine
        self.model = model
        self.raw_request = raw_request
        self.priority = priority
        self.slots = asyncio.Semaphore(most)

    async def logprobs(self, prompt: list[int], scoring: Scoring) -> list[float]:
        """Return the log-probabilities of the masked tokens of a text after a prompt."""
        places = scoring.places
        if not places:
            return []
        arguments = {TEMPLATE: scoring.template, TARGETS: scoring.targets}
        choice = await self._complete(prompt, places[-1] + 1, arguments)
        assert choice.logprobs is not None
        scored = choice.logprobs.token_logprobs
        return [score for place in places if (score := scored[place]) is not None]

    async def is_greedy(self, prompt: list[int], continuation: list[int]) -> bool:
        """Return whether a decode of one token a forward writes the continuation."""
        length = len(continuation)
        arguments = {
            TEMPLATE: [FILL] * length,
            "dllm_policy": "low_confidence",
            "dllm_steps": length,
        }
        choice = await self._complete(prompt, length, arguments)
        return bool(choice.token_ids == continuation)

    async def _complete(
        self, prompt: list[int], max_tokens: int, arguments: dict[str, Any]
    ) -> CompletionResponseChoice:
        request = forward_request(
            self.model, prompt, max_tokens, arguments, self.priority
        )
        async with self.slots:
            reply = await self.handler.create_completion(request, self.raw_request)
        if isinstance(reply, ErrorResponse):
            raise Refused(reply)
        assert isinstance(reply, CompletionResponse), "not a stream"
        [choice] = reply.choices
        check_ended(choice.finish_reason)
        return choice


async def together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all calls; the first that fails, or the reader's leaving, ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
