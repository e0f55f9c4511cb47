"""Turn snapshots of a canvas into frames, and merge frames into a stream of events.

A frame has what changed since the last frame that was sent. A position counts output
tokens from 0. Text never waits for frames; frames may be dropped.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from vllm.outputs import CompletionOutput

from dllm_plugin.config.carriers import NO_TOKEN, Snapshot, unpack_trace

# What a part of a character decodes to.
BROKEN = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4  # bytes, and so tokens
DIGITS = 6  # of confidences in traces
Decode = Callable[[Sequence[int]], str]


class Shown(NamedTuple):
    """Store what was last sent of a position; confidence is None if it is not known."""

    text: str
    confidence: float | None


class Frames:
    """Make the frames of one choice of a reply.

    tokens  ids of the final text so far: never lost, as snapshots may be
    ended   no more tokens follow
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._shown: dict[int, Shown] = {}
        # Positions before it were sent for the last time.
        self._settled = 0
        self.tokens: list[int] = []
        self.ended = False

    def frame(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the frame of a snapshot, which then counts as sent."""
        start, ids = snapshot.start, snapshot.ids
        # Perhaps by a stop string: later tokens do not count.
        if self.ended:
            ids = ids[: max(0, len(self.tokens) - start)]
        first = min(self._settled, start)
        # Tokens decided in forwards of which no snapshot arrived.
        before = self.tokens[first:start]
        masks = [NO_TOKEN] * (start - first - len(before))
        texts = self._texts([*before, *masks, *ids])
        confidences = dict(enumerate(snapshot.confidences, start))
        unset = [place for place in self._shown if place >= first + len(texts)]
        for place in unset:
            del self._shown[place]
        set_entries: list[list[Any]] = []
        for position, text in enumerate(texts, first):
            last = self._shown.get(position)
            if text is None:
                if last is not None:
                    del self._shown[position]
                    unset.append(position)
                continue
            unknown = None if last is None else last.confidence
            shown = Shown(text, confidences.get(position, unknown))
            if shown != last:
                self._shown[position] = shown
                set_entries.append([position, *shown])
        final = len(self.tokens) if self.ended else snapshot.final
        self._settle(min(final, start))
        frame = {
            "forward": snapshot.forward,
            "start": start,
            "length": len(ids),
            "final": final,
            "set": set_entries,
            "unset": unset,
        }
        if snapshot.drafts is not None:
            frame["drafted_tokens"], frame["accepted_tokens"] = snapshot.drafts
        return frame

    def _settle(self, position: int) -> None:
        """Forget positions that no later frame can change, whole characters at a time."""
        while position > self._settled and self._last_text(position) == "":
            position -= 1
        while self._settled < position and (
            position - self._settled > LONGEST_CHARACTER
            or BROKEN not in self._last_text(self._settled)
        ):
            self._shown.pop(self._settled, None)
            self._settled += 1

    def _last_text(self, position: int) -> str:
        shown = self._shown.get(position)
        return BROKEN if shown is None else shown.text

    def _texts(self, ids: Sequence[int]) -> list[str | None]:
        """Return the text of each token by itself, None for masks.

        Parts of a character are shown as such until all are there; then the first has it.
        """
        texts = [None if i < 0 else self._decode([i]) for i in ids]
        place = 0
        while place < len(texts):
            length = self._length_of_character(ids, texts, place)
            if length > 1:
                whole = self._decode(ids[place : place + length])
                texts[place : place + length] = [whole, *[""] * (length - 1)]
            place += length
        return texts

    def _length_of_character(
        self, ids: Sequence[int], texts: Sequence[str | None], place: int
    ) -> int:
        """Return how many tokens from `place` on make a character; 1 if they do not yet."""
        for length in range(2, LONGEST_CHARACTER + 1):
            parts = texts[place : place + length]
            if len(parts) < length or any(BROKEN not in (part or "") for part in parts):
                return 1
            if BROKEN not in self._decode(ids[place : place + length]):
                return length
        return 1


def trace_of(completion: CompletionOutput) -> dict[str, Any]:
    """Remove the trace of a choice that ended, and return it as JSON.

    A confidence is None if no policy took the token.
    """
    steps: list[int] = []
    confidences: list[float | None] = []
    rows = unpack_trace(completion)
    for step, confidence in () if rows is None else rows.tolist():
        steps.append(int(step))
        known = not math.isnan(confidence)
        confidences.append(round(confidence, DIGITS) if known else None)
    return {"steps": steps, "confidences": confidences}


CHAT_CHUNK, COMPLETION_CHUNK = "chat.completion.chunk", "text_completion"
EVENT, END = "data: ", "[DONE]"


class FrameSource:
    """Store the newest snapshot of each choice, until it is sent."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._frames: dict[int, Frames] = {}
        self._newest: dict[int, Snapshot] = {}
        self._arrived = asyncio.Event()
        self.request_id = ""

    def add_tokens(self, choice: int, token_ids: list[int]) -> None:
        """Add final text of a choice."""
        self._of(choice).tokens.extend(token_ids)

    def end(
        self, choice: int, forwards: int, drafts: tuple[int, int] | None = None
    ) -> None:
        """End a choice: its last frame shows what no snapshot did."""
        frames = self._of(choice)
        frames.ended = True
        length = len(frames.tokens)
        last = Snapshot("", forwards, length, length, [], [], drafts)
        self.add_snapshot(choice, last)

    def add_snapshot(self, choice: int, snapshot: Snapshot) -> None:
        """Add a snapshot in place of an earlier one of the choice that was not sent."""
        self._newest[choice] = snapshot
        self._arrived.set()

    async def wait(self) -> None:
        """Wait for a snapshot."""
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
    return f"{EVENT}{text}\n\n"


def changed(event: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """Return an event with its chunk changed; errors and the end of a stream stay."""
    body = event.removeprefix(EVENT).rstrip("\n")
    if not event.startswith(EVENT) or body == END:
        return event
    chunk = json.loads(body)
    return event_of(change(chunk)) if "choices" in chunk else event


def frame_events(
    source: FrameSource, kind: str, created: int, model: str
) -> Iterator[str]:
    """Yield an ordinary chunk without text for each frame that has arrived."""
    for choice, frame in source.take():
        text: dict[str, Any] = {"delta": {}} if kind == CHAT_CHUNK else {"text": ""}
        entry = {"index": choice, **text, "finish_reason": None, "diffusion": frame}
        head = {"id": source.request_id, "object": kind, "created": created}
        yield event_of(head | {"model": model, "choices": [entry]})


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
