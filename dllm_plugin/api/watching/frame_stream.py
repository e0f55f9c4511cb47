"""Merge frames into a stream of events: text never waits, frames may be dropped."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from dllm_plugin.api.watching.frames import Decode, Frames
from dllm_plugin.config.carriers import Snapshot

CHAT_CHUNK, COMPLETION_CHUNK = "chat.completion.chunk", "text_completion"


class FrameSource:
    """The newest snapshot of each choice, until it is sent."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._frames: dict[int, Frames] = {}
        self._newest: dict[int, Snapshot] = {}
        self._arrived = asyncio.Event()
        self.request_id = ""

    def add_tokens(self, choice: int, token_ids: list[int]) -> None:
        """Add final text of a choice."""
        self._of(choice).tokens.extend(token_ids)

    def end(self, choice: int, forwards: int) -> None:
        """End a choice: its last frame shows what no snapshot did."""
        frames = self._of(choice)
        frames.ended = True
        length = len(frames.tokens)
        self.add_snapshot(choice, Snapshot("", forwards, length, length, [], []))

    def add_snapshot(self, choice: int, snapshot: Snapshot) -> None:
        """Add a snapshot in place of an earlier one of the choice that was not sent."""
        self._newest[choice] = snapshot
        self._arrived.set()

    async def wait(self) -> None:
        """Return when there is a snapshot to take."""
        await self._arrived.wait()

    def take(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the frames of what has arrived, by choice."""
        newest, self._newest = self._newest, {}
        self._arrived.clear()
        for choice, snapshot in newest.items():
            yield choice, self._of(choice).frame(snapshot)

    def _of(self, choice: int) -> Frames:
        return self._frames.setdefault(choice, Frames(self._decode))


def event_of(chunk: dict[str, Any]) -> str:
    """Return a chunk as an event of a stream."""
    text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n"


def frame_events(
    source: FrameSource, kind: str, created: int, model: str
) -> Iterator[str]:
    """Yield an ordinary chunk without text for each frame that has arrived."""
    for choice, frame in source.take():
        text: dict[str, Any] = {"delta": {}} if kind == CHAT_CHUNK else {"text": ""}
        entry = {"index": choice, **text, "finish_reason": None, "diffusion": frame}
        chunk = {
            "id": source.request_id,
            "object": kind,
            "created": created,
            "model": model,
            "choices": [entry],
        }
        yield event_of(chunk)


async def with_frames(
    events: AsyncGenerator[str, None], source: FrameSource, kind: str, model: str
) -> AsyncGenerator[str, None]:
    """Yield events as they come, and in between the newest frames, whichever is there first."""
    created = int(time.time())
    # One task at a time advances the events, and it is never cancelled half way.
    event = asyncio.ensure_future(anext(events))
    frame = asyncio.ensure_future(source.wait())
    try:
        while True:
            await asyncio.wait({event, frame}, return_when=asyncio.FIRST_COMPLETED)
            if frame.done():
                for chunk in frame_events(source, kind, created, model):
                    yield chunk
                frame = asyncio.ensure_future(source.wait())
            if event.done():
                try:
                    text = event.result()
                except StopAsyncIteration:
                    return
                yield text
                event = asyncio.ensure_future(anext(events))
    finally:
        for task in (event, frame):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await task
        await events.aclose()
