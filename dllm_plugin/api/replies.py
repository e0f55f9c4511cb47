"""Add a request's counts to vLLM's replies: whole ones and streams of events."""

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from dllm_plugin.api.counts import total
from dllm_plugin.api.watching.frame_stream import event_of
from dllm_plugin.api.watching.watched_engine import WatchedEngine

EVENT = "data: "
END = "[DONE]"


def add_counts(
    reply: dict[str, Any], engine: WatchedEngine, method: dict[str, str]
) -> dict[str, Any]:
    """Add ``diffusion`` to each choice that has ended, and to ``metrics`` beside usage.

    The choice's own has its trace as well, if the request asks for it.

    Args:
        reply: a reply or one chunk of a stream, as vLLM writes it.
        method: strategy and policy of the request.
    """
    for choice in reply["choices"]:
        counts = engine.counts.get(choice["index"])
        if choice.get("finish_reason") is not None and counts is not None:
            choice["diffusion"] = counts.as_json()
            if (trace := engine.traces.get(choice["index"])) is not None:
                choice["diffusion"]["trace"] = trace
    # A stream has its usage in a chunk without choices, after all of them have ended.
    whole = (
        reply.get("object") in ("chat.completion", "text_completion")
        or not reply["choices"]
    )
    if whole and reply.get("usage") is not None and engine.counts:
        own = {k: v for k, v in (reply.get("metrics") or {}).items() if v is not None}
        together = total(list(engine.counts.values())).as_json()
        reply["metrics"] = own | {"diffusion": together | method}
    return reply


async def with_counts(
    events: AsyncGenerator[str, None], engine: WatchedEngine, method: dict[str, str]
) -> AsyncGenerator[str, None]:
    """Yield a stream's events; after a choice's end events may get its counts."""
    async with contextlib.aclosing(events):
        async for event in events:
            yield _rewritten(event, engine, method) if engine.counts else event


def _rewritten(event: str, engine: WatchedEngine, method: dict[str, str]) -> str:
    body = event.removeprefix(EVENT).rstrip("\n")
    if not event.startswith(EVENT) or body == END:
        return event
    chunk = json.loads(body)
    if "choices" not in chunk:  # an error
        return event
    return event_of(add_counts(chunk, engine, method))
