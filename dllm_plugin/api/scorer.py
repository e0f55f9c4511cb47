"""Ask vLLM's handler for forwards that score given tokens, each of which is one request.

A request's template masks some tokens of a text, and its targets say which ones they must take.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import Request
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
)
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)

from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.arguments import STATISTICS, TARGETS, TEMPLATE


class Text(NamedTuple):
    """Store the token ids of a text whose end is scored."""

    context: list[int]
    continuation: list[int]


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


class Scorer:
    """Request the forwards of one call, as many at a time as run in a batch."""

    def __init__(
        self,
        handler: OpenAIServingCompletion,
        model: str | None,
        most: int,
        raw_request: Request,
        priority: int = 0,
    ) -> None:
        self.handler = handler
        self.model = model
        self.raw_request = raw_request
        self.priority = priority
        self.slots = asyncio.Semaphore(most)

    async def logprobs(self, text: Text, places: Sequence[int]) -> list[float]:
        """Return the log-probabilities of the tokens at these places, which are masked."""
        targets = [text.continuation[place] for place in places]
        arguments = {TEMPLATE: masked(text, places), TARGETS: targets}
        choice = await self._complete(text, places[-1] + 1, arguments)
        assert choice.logprobs is not None
        scored = choice.logprobs.token_logprobs
        return [score for place in places if (score := scored[place]) is not None]

    async def is_greedy(self, text: Text) -> bool:
        """Return whether a decode of one token a forward writes the continuation."""
        length = len(text.continuation)
        arguments = {TEMPLATE: [FILL] * length, "dllm_policy": "low_confidence"}
        choice = await self._complete(text, length, arguments | {"dllm_steps": length})
        return bool(choice.token_ids == text.continuation)

    async def _complete(
        self, text: Text, max_tokens: int, arguments: dict[str, Any]
    ) -> CompletionResponseChoice:
        request = self.request(text, max_tokens, arguments)
        async with self.slots:
            reply = await self.handler.create_completion(request, self.raw_request)
        if isinstance(reply, ErrorResponse):
            raise Refused(reply)
        assert isinstance(reply, CompletionResponse), "not a stream"
        [choice] = reply.choices
        check_ended(choice.finish_reason)
        return choice

    def request(
        self, text: Text, max_tokens: int, arguments: dict[str, Any]
    ) -> CompletionRequest:
        """Return the request of one forward, of the priority of the call."""
        return CompletionRequest(
            model=self.model,
            prompt=text.context,
            max_tokens=max_tokens,
            temperature=0,
            seed=None,
            ignore_eos=True,
            logprobs=0,
            return_token_ids=True,
            priority=self.priority,
            vllm_xargs=arguments | {STATISTICS: 1},
        )


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
