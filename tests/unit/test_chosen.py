"""What trying several lengths asks of a server, and says where it broke off."""

import asyncio
from http import HTTPStatus
from typing import Any

import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from dllm_plugin.api.answers import Asked
from dllm_plugin.api.chosen import OF_STREAM, check, check_arguments, in_one_piece
from dllm_plugin.api.scorer import Refused, check_ended, forward_request
from dllm_plugin.config.request.arguments import STATISTICS


def test_forwards_have_the_priority_of_the_call() -> None:
    for priority in (-3, 0):
        request = forward_request("tiny", [1], 1, {}, priority)
        assert request.priority == priority and request.vllm_xargs == {STATISTICS: 1}


def test_an_aborted_answer_is_refused() -> None:
    for reason in ("stop", "length", None):
        check_ended(reason)
    with pytest.raises(Refused, match="The server aborted this request") as caught:
        check_ended("abort")
    assert caught.value.reply.error.code == HTTPStatus.SERVICE_UNAVAILABLE


@pytest.mark.parametrize("name", ["dllm_early_text"])
def test_arguments_that_need_one_length(name: str) -> None:
    request = CompletionRequest(prompt="a", vllm_xargs={name: 1})
    check_arguments(request)
    with pytest.raises(ValueError) as caught:
        check(request, None)
    assert str(caught.value) == f"{name} needs one length: give it as an integer."
    check(CompletionRequest(prompt="a", vllm_xargs={name: 0}), Asked())


@pytest.mark.parametrize(
    ("options", "forced", "first", "last"),
    [
        (None, False, False, False),
        (None, True, True, True),
        ({"include_usage": True}, False, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, False, True, True),
        ({"continuous_usage_stats": True}, False, False, False),
    ],
    ids=str,
)
def test_usage_of_a_stream(options: Any, forced: bool, first: bool, last: bool) -> None:
    """As in vLLM's own streams, also where the server forces it."""
    request = CompletionRequest(prompt="a", stream=True, stream_options=options)
    reply: dict[str, Any] = dict.fromkeys(
        ("id", "object", "created", "model", "metrics")
    )
    reply |= {"choices": [dict.fromkeys(OF_STREAM)], "usage": {"total_tokens": 3}}

    async def events() -> list[str]:
        return [event async for event in in_one_piece(reply, request, forced)]

    sent = asyncio.run(events())
    assert ("usage" in sent[0]) == first and len(sent) == 2 + last
    assert ("usage" in sent[-2]) == (first or last) and "[DONE]" in sent[-1]
