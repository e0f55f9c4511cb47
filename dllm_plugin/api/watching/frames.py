"""Turn snapshots of a canvas into frames, and read traces.

A frame has what changed since the last frame that was sent. A position counts output
tokens from 0. No HTTP and no engine here.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.outputs import CompletionOutput

from dllm_plugin.config.carriers import NO_TOKEN, Snapshot, unpack_trace

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a part of a character decodes to
LONGEST_CHARACTER = 4  # bytes, and so tokens
DIGITS = 6  # of confidences in traces
Decode = Callable[[Sequence[int]], str]


class Shown(NamedTuple):
    """What was last sent of a position; confidence is None if it is not known."""

    text: str
    confidence: float | None


class Frames:
    """The frames of one choice of a reply.

    tokens  ids of the final text so far: never lost, as snapshots may be
    ended   no more tokens follow
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._shown: dict[int, Shown] = {}
        self._settled = 0  # positions before it were sent for the last time
        self.tokens: list[int] = []
        self.ended = False

    def frame(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the frame of a snapshot, which is then taken as sent."""
        start, ids = snapshot.start, snapshot.ids
        if self.ended:  # perhaps by a stop string, and later tokens do not count
            ids = ids[: max(0, len(self.tokens) - start)]
        first = min(self._settled, start)
        # Tokens decided in forwards of which no snapshot arrived.
        before = self.tokens[first:start]
        masks = [NO_TOKEN] * (start - first - len(before))
        texts = self._texts([*before, *masks, *ids])
        confidences = dict(enumerate(snapshot.confidences, start))
        unset = self._forget_from(first + len(texts))
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
        return {
            "forward": snapshot.forward,
            "start": start,
            "length": len(ids),
            "final": final,
            "set": set_entries,
            "unset": unset,
        }

    def _forget_from(self, stop: int) -> list[int]:
        """Forget positions from `stop` on, and return them."""
        gone = [position for position in self._shown if position >= stop]
        for position in gone:
            del self._shown[position]
        return gone

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
