"""Which tokens of a prompt begin a character that they do not end, and refused grammars."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from dllm_plugin.api.output_processor import REFUSED, refusing, split

ACCENT, PEPPER = "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{HOT PEPPER}"


def decode(ids: Sequence[int]) -> str:
    """Bytes are the tokens."""
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", [ACCENT, PEPPER])
@pytest.mark.parametrize("before", ["", "so ", ACCENT, PEPPER])
def test_prompts_cut_at_each_byte(text: str, before: str) -> None:
    known, whole = before.encode(), text.encode()
    for cut in range(1, len(whole)):
        assert split(known + whole[:cut], decode) == (known, whole[:cut])


def test_broken_prompts() -> None:
    """Bytes that begin nothing, and the replacement character itself."""
    assert split(b"\x80" * 20, decode) == ([], [])
    text = "a\N{REPLACEMENT CHARACTER}".encode()
    assert split(text, decode) == (b"a", text[1:])


EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
START = {"type": "http.response.start", "status": 200, "headers": EVENTS}
PIECES = [
    {"type": "http.response.body", "body": b"data: a", "more_body": True},
    {"type": "http.response.body", "body": b"data: b", "more_body": False},
]


@pytest.mark.parametrize("refused_after", [0, 1, None])
def test_streams_whose_grammar_is_refused(refused_after: int | None) -> None:
    """Before its first event a stream becomes a 400; after it, the events go on as they are."""
    sent: list[Message] = []

    async def keep(message: Message) -> None:
        sent.append(message)

    async def nothing() -> Message:
        raise AssertionError("nothing reads the body")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        sender = refusing(scope, receive, send)
        await sender(dict(START))
        assert not sent
        for place, piece in enumerate(PIECES):
            if place == refused_after:
                REFUSED.get().append("tools cannot be honoured.")
            await sender(dict(piece))

    scope: dict[str, Any] = {"type": "http", "method": "POST"}
    asyncio.run(answer(scope, nothing, keep))
    if refused_after != 0:
        assert sent == [START, *PIECES]
        return
    start, body = sent
    assert start["status"] == 400
    assert json.loads(body["body"])["error"]["message"] == "tools cannot be honoured."
