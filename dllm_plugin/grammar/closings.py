"""Search ids that complete a text within a budget, in a grammar whose rules are not known.

The grammar verifies every closing, so a search that finds none costs a draft, or the promise that
the text ends complete; never validity. Searches have limits of places and of time.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .matchers import Matcher
from .vocabulary import CLOSERS, Vocabulary, holds

SIBLINGS = 48  # ids of several bytes that are tried at one place
# With more bytes of a kind allowed (digits, letters), the first byte stands for all.
ALIKE = 6
KINDS = (
    b"0123456789",
    bytes(range(97, 123)),
    bytes(range(65, 91)),
    bytes(range(128, 256)),
)
CLOSING_PIECES = [bytes([byte]) for byte in CLOSERS]
NO_ID = -1
MOST_FORCED = 64  # bytes of forced text


class Limits(NamedTuple):
    """Bound a search: `nodes` places of each search, and two deadlines.

    Bounded by places only, a search finds the same on any machine, so time is a last resort. It is
    this thread's processor time, because a thread beside a busy one mostly waits for Python's lock.

    deadline  by `time.thread_time`
    latest    by `time.monotonic`
    """

    nodes: int
    deadline: float
    latest: float

    @classmethod
    def within(cls, nodes: int, seconds: float, clock: float) -> "Limits":
        """Return limits from now on, `clock` times as long by the clock."""
        return cls(
            nodes, time.thread_time() + seconds, time.monotonic() + clock * seconds
        )

    def over(self) -> bool:
        """Return whether the time is up."""
        return time.thread_time() > self.deadline or time.monotonic() > self.latest


class Searcher:
    """Search for closings in one vocabulary. Every matcher given stays where it is."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._single = vocabulary.order[: vocabulary.num_single]
        first = np.array(
            [vocabulary.pieces[i][0] for i in self._single], dtype=np.int64
        )
        self._kinds = [np.isin(first, list(kind)) for kind in KINDS]

    def closing_of(self, matcher: Matcher, text: bytes, room: int) -> list[int] | None:
        """Return a text as ids if it is a closing here and fits."""
        if not text:
            return [] if matcher.complete() else None
        vocabulary = self.vocabulary
        spellings = (
            vocabulary.encode(text),
            vocabulary.cut(text),
            vocabulary.cut(text, longest=1),
        )
        for ids in spellings:
            if ids and len(ids) <= room and closes(matcher, ids):
                return ids
        return None

    def search(self, matcher: Matcher, room: int, limits: Limits) -> list[int] | None:
        """Return a closing of at most `room` ids that a search finds depth-first.

        It finds what the usual closers close, which is enough for grammars without a chart.
        """
        place, nodes, most = matcher.fork(), limits.nodes, 8 * room + 64
        path: list[int] = []
        steps = [self._steps(place, NO_ID)]
        while not place.complete():
            nodes -= 1
            if not steps or nodes < 0 or limits.over():
                return None
            token = next(steps[-1], None) if len(path) < most else None
            if token is None:
                steps.pop()
                if path:
                    path.pop()
                    place.rollback(1)
            elif place.accept(token):
                path.append(token)
                steps.append(self._steps(place, token))
        found = self.closing_of(matcher, self.vocabulary.text(path), room)
        if found is None and len(path) <= room:
            return path
        return found

    def _steps(self, matcher: Matcher, last: int) -> Iterator[int]:
        """Yield next ids, those first that end a text soonest; alike bytes count once.

        The id before comes last, for it may repeat without end, unless it closes something.
        """
        row = matcher.allowed()
        allowed = holds(row, self._single)
        chosen = self._single[allowed & ~self._is_alike(allowed)]
        if not len(chosen):
            longer = self.vocabulary.order[len(self._single) :]
            chosen = longer[holds(row, longer)][:SIBLINGS]
        ids = chosen.tolist()
        if last in ids and self.vocabulary.pieces[last] not in CLOSING_PIECES:
            ids.remove(last)
            ids.append(last)
        yield from ids

    def _is_alike(self, allowed: np.ndarray) -> np.ndarray:
        """Mark bytes of a kind of which many are allowed, except the first byte."""
        alike = np.zeros_like(allowed)
        for kind in self._kinds:
            places = np.flatnonzero(allowed & kind)
            if len(places) > ALIKE:
                alike[places[1:]] = True
        return alike

    def forced_text(self, matcher: Matcher) -> bytes:
        """Return the text that must follow here, at most MOST_FORCED bytes of it.

        Not by the backends' own functions for this: xgrammar's does not return where a grammar
        forces text without end.
        """
        text: list[int] = []
        # Without ids for all bytes nobody knows which byte must follow.
        while len(self._single) == 256 and len(text) < MOST_FORCED:
            allowed = self._single[holds(matcher.allowed(), self._single)]
            if len(allowed) != 1:
                break
            token = int(allowed[0])
            if matcher.complete() or not matcher.accept(token):
                break
            text.append(token)
        matcher.rollback(len(text))
        return self.vocabulary.text(text)


def go(matcher: Matcher, ids: tuple[int, ...] | list[int]) -> bool:
    """Accept all ids, or none."""
    for count, token in enumerate(ids):
        if not matcher.accept(token):
            matcher.rollback(count)
            return False
    return True


def taken(matcher: Matcher, ids: list[int]) -> int:
    """Return how many leading ids the grammar accepts; the matcher stays."""
    count = 0
    for token in ids:
        if not matcher.accept(token):
            break
        count += 1
    matcher.rollback(count)
    return count


def closes(matcher: Matcher, ids: list[int]) -> bool:
    """Return whether ids complete the text; the matcher stays."""
    if not go(matcher, ids):
        return False
    done = matcher.complete()
    matcher.rollback(len(ids))
    return done
