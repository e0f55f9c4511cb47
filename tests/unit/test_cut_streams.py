"""Streams of the routes that vLLM makes of a chat's, when the server ends."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Send
from vllm.exceptions import VLLMValidationError

from dllm_plugin.commands.server import Lifecycle
from dllm_plugin.commands.server_end import CUT

EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
START = {"type": "http.response.start", "status": 200, "headers": []}
PING = {
    "type": "http.response.body",
    "body": b"event: ping\ndata: {}\n\n",
    "more_body": True,
}
LAST = {"type": "http.response.body", "body": b"{}"}


async def endless(scope: Message, receive: Receive, send: Send) -> None:
    await send(START | {"headers": [EVENTS]})
    while True:
        await send(dict(PING))
        await asyncio.sleep(0)


async def refused(scope: Message, receive: Receive, send: Send) -> None:
    """As vLLM's refusal of a stream whose first event was sent reaches a middleware."""
    await send(START | {"headers": [EVENTS]})
    await send(dict(PING))
    raise RuntimeError("too late") from VLLMValidationError("top_k is odd")


async def whole(scope: Message, receive: Receive, send: Send) -> None:
    await asyncio.sleep(0.01)
    await send(dict(START))
    await send(dict(LAST))


async def sent_by(app: ASGIApp, path: str, cut_after: int) -> list[dict[str, Any]]:
    """What is sent to a client if the server cuts after so many messages."""
    sent: list[dict[str, Any]] = []
    cut = asyncio.Event()
    if not cut_after:
        cut.set()

    async def send(message: Message) -> None:
        sent.append(dict(message))
        if len(sent) == cut_after:
            cut.set()

    async def receive() -> Message:
        raise AssertionError("nothing reads the body")

    lifecycle = Lifecycle(app)
    await lifecycle.handle_until_cut({"path": path}, receive, send, cut)
    return sent


def error_of(path: str, events: int) -> dict[str, Any]:
    """The data of the event that ends a stream after so many events at least."""
    sent = asyncio.run(sent_by(endless, path, 1 + events))
    *pings, last = sent[1:]
    assert pings[:events] == [PING] * events and not last.get("more_body")
    event, data = last["body"].decode().strip().split("\n")
    assert event == "event: error"
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))
    if "sequence_number" in found:
        assert found["sequence_number"] == len(pings)
    return found


@pytest.mark.parametrize("events", [0, 3])
def test_anthropic_messages(events: int) -> None:
    error = error_of("/v1/messages", events)["error"]
    assert error == {"type": "overloaded_error", "message": CUT}


@pytest.mark.parametrize("events", [0, 3])
def test_responses(events: int) -> None:
    error = error_of("/v1/responses", events)
    assert error["type"] == "error" and error["message"] == CUT
    assert error["code"] == "server_error"


@pytest.mark.parametrize("cut_after", [0, 9])
def test_a_reply_that_is_no_stream_is_left_alone(cut_after: int) -> None:
    sent = asyncio.run(sent_by(whole, "/v1/messages", cut_after))
    assert sent == [START, LAST]


@pytest.mark.parametrize(
    ("path", "key"), [("/v1/responses", "code"), ("/v1/messages", "type")]
)
def test_a_refused_stream_ends_with_the_sentence(path: str, key: str) -> None:
    *_, last = asyncio.run(sent_by(refused, path, 99))
    error = json.loads(last["body"].split(b"data: ")[1])
    error = error.get("error", error)
    assert error["message"] == "top_k is odd"
    assert error[key] == "invalid_request_error"
