"""Turn snapshots of a canvas into frames: what changed since the last frame that was sent.

A position counts output tokens from 0. No HTTP and no engine here.

Say at which forward each token of a choice was taken, and how certain it was.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm.outputs import CompletionOutput

from dllm_plugin.config.request.reporting import UNKNOWN_CONFIDENCE

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a part of a character decodes to
LONGEST_CHARACTER = 4  # bytes, and so tokens
Decode = Callable[[Sequence[int]], str]


class Shown(NamedTuple):
    """Hold what was last sent of a position: its text, and the confidence in hundredths."""

    text: str
    confidence: int

    def as_json(self, position: int) -> list[Any]:
        """Return an entry of a frame's `set`."""
        known = self.confidence != UNKNOWN_CONFIDENCE
        return [position, self.text, self.confidence / 100 if known else None]


class Frames:
    """Follow one choice of a reply, and say what each frame changes.

    tokens  ids of the final text so far: never lost, as snapshots may be
    ended   no more tokens follow
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._shown: dict[int, Shown] = {}
        self._settled = 0  # positions before it were sent for the last time
        self.tokens: list[int] = []
        self.ended = False

    def frame(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Return the frame of a snapshot, and note that it was sent."""
        start = int(snapshot["start"])
        ids = np.frombuffer(snapshot["ids"], dtype=np.int32).tolist()
        if (
            self.ended
        ):  # by a stop string, perhaps, and the rest was decided for nothing
            ids = ids[: max(0, len(self.tokens) - start)]
        confidences = dict(enumerate(snapshot["confidences"], start))
        first = min(self._settled, start)
        before = self.tokens[
            first:start
        ]  # decided in forwards of which no snapshot arrived
        now = self._texts([*before, *([-1] * (start - first - len(before))), *ids])
        set_entries: list[list[Any]] = []
        unset = [position for position in self._shown if position >= first + len(now)]
        for position in unset:
            del self._shown[position]
        for position, text in enumerate(now, first):
            last = self._shown.get(position)
            if text is None:
                if last is not None:
                    del self._shown[position]
                    unset.append(position)
                continue
            unknown = UNKNOWN_CONFIDENCE if last is None else last.confidence
            shown = Shown(text, confidences.get(position, unknown))
            if shown != last:
                self._shown[position] = shown
                set_entries.append(shown.as_json(position))
        final = len(self.tokens) if self.ended else int(snapshot["final"])
        self._settle(min(final, start))
        return {
            "forward": snapshot["forward"],
            "start": start,
            "length": len(ids),
            "final": final,
            "set": set_entries,
            "unset": unset,
        }

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


DIGITS = 6


def trace_of(completion: CompletionOutput) -> dict[str, Any]:
    """Return the trace of a choice that ended; confidence is None where no policy took the token.

    The engine sends it in the field that vLLM joins and cuts by tokens.
    """
    rows = completion.routed_experts
    steps, confidences = ([], []) if rows is None else rows.T.tolist()
    certain = [
        None if value != value else round(value, DIGITS) for value in confidences
    ]
    return {"steps": list(map(int, steps)), "confidences": certain}
