"""Search ids that complete a text within a budget, in a grammar whose rules are not known.

The grammar verifies every closing, so a search that finds none costs a draft, or the promise that
the text ends complete; never validity. Searches have limits of places and of time.
"""

import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dllm_plugin.grammar.matchers import Matcher
from dllm_plugin.grammar.vocabulary import WORD, Vocabulary, first_set, holds

SIBLINGS = 48  # ids of several bytes that are tried at one place
SHORT = 8  # ids of a closing that no other search would make much shorter
# With more bytes of a kind allowed (digits, letters), the first one stands for all.
ALIKE = 6
KINDS = (
    b"0123456789",
    bytes(range(97, 123)),
    bytes(range(65, 91)),
    bytes(range(128, 256)),
)
MOST_FORCED = 64  # bytes of forced text
SUFFIX_WORK = 1500  # ids that are tried to close a text by the rest of another closing


Look = tuple[bytes, bool]  # ids that may follow a place; whether the text may end


class Limits(NamedTuple):
    """Bound a search: `nodes` places of each search, and two deadlines.

    With places alone a search finds the same on any machine, so time is a last resort. It is this
    thread's processor time, because a thread beside a busy one mostly waits for Python's lock.

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
        single = vocabulary.order[: vocabulary.num_single]
        first = np.array([vocabulary.pieces[i][0] for i in single], dtype=np.int64)
        self._kinds = [np.isin(first, list(kind)) for kind in KINDS]

    def shorten(self, matcher: Matcher, ids: list[int]) -> list[int]:
        """Return a closing, in fewer ids if the grammar takes those that the tokenizer makes."""
        text = self.vocabulary.text(ids)
        for other in (self.vocabulary.encode(text), self.vocabulary.cut(text)):
            if other and len(other) < len(ids) and closes(matcher, other):
                ids = other
        return ids

    def closing_of(self, matcher: Matcher, text: bytes, room: int) -> list[int] | None:
        """Return a text as ids if it is a closing here and fits."""
        if not text:
            return [] if matcher.complete() else None
        for ids in (self.vocabulary.encode(text), self.vocabulary.cut(text)):
            if ids and len(ids) <= room and closes(matcher, ids):
                return ids
        ids = self.vocabulary.cut(text, longest=1)
        return ids if ids and len(ids) <= room and closes(matcher, ids) else None

    def rest(
        self, matcher: Matcher, known: list[int], added: list[int], room: int
    ) -> list[int] | None:
        """Return the rest of a known closing, once ids were added that begin it."""
        if matcher.complete():
            return []
        count = len(added)
        if known[:count] != added or len(known) - count > room:
            return None
        return known[count:] if closes(matcher, known[count:]) else None

    def suffix(
        self, matcher: Matcher, known: list[int], added: list[int], room: int
    ) -> list[int] | None:
        """Return a suffix of a known closing that closes the text after other ids as well."""
        text, new = self.vocabulary.text(known), self.vocabulary.text(added)
        likely = len(new) if text.startswith(new) else 0
        work = SUFFIX_WORK
        for start in _suffixes(len(text), likely, len(new)):
            if work <= 0:
                return None
            work -= 1 + min(len(text) - start, 64)
            found = self.closing_of(matcher, text[start:], room)
            if found is not None:
                return found
        return None

    def search(self, matcher: Matcher, room: int, limits: Limits) -> list[int] | None:
        """Return a closing of at most `room` ids: the shorter of those of two searches.

        A short one of the first search is enough.
        """
        best: list[int] | None = None
        middle = (time.thread_time() + limits.deadline) / 2
        searches = (
            (self._dive, limits._replace(deadline=middle)),
            (self._seek, limits),
        )
        for find, within in searches:
            found = find(matcher, room, within)
            if found is None:
                continue
            found = self.shorten(matcher, found)
            if len(found) <= room and (best is None or len(found) < len(best)):
                best = found
            if best is not None and len(best) <= SHORT:
                break
        return best

    def _steps(self, matcher: Matcher) -> Iterator[tuple[int, ...]]:
        """Yield next ids, those first that end a text soonest; alike bytes count once."""
        row, order = matcher.allowed(), self.vocabulary.order
        single = self.vocabulary.num_single
        allowed = holds(row, order[:single])
        chosen = order[:single][allowed & ~self._is_alike(allowed)]
        if not len(chosen):
            chosen = order[single:][holds(row, order[single:])][:SIBLINGS]
        for token in chosen.tolist():
            yield (token,)

    def _is_alike(self, allowed: np.ndarray) -> np.ndarray:
        """Mark bytes of a kind of which many are allowed, except the first one."""
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
        # A vocabulary without ids for all bytes cannot tell which byte must follow.
        while self.vocabulary.num_single == 256 and len(text) < MOST_FORCED:
            single = matcher.allowed() & self.vocabulary.single_bits
            token = first_set(single)
            words = np.flatnonzero(single)
            if len(words) != 1 or int(single[words[0]]) & 0xFFFFFFFF != 1 << (
                token % WORD
            ):
                break
            if matcher.complete() or not matcher.accept(token):
                break
            text.append(token)
        matcher.rollback(len(text))
        return self.vocabulary.text(text)

    def _dive(self, matcher: Matcher, room: int, limits: Limits) -> list[int] | None:
        """Search depth-first, which finds what the usual closers close."""
        place, nodes, most = matcher.fork(), limits.nodes, 8 * room + 64
        if place.complete():
            return []
        path: list[tuple[int, ...]] = []
        length, steps = 0, [self._steps(place)]
        while steps and nodes > 0 and not limits.over():
            nodes -= 1
            step = next(steps[-1], None) if length < most else None
            if step is None:
                steps.pop()
                if path:
                    last = path.pop()
                    place.rollback(len(last))
                    length -= len(last)
                continue
            if not go(place, step):
                continue
            path.append(step)
            length += len(step)
            if place.complete():
                return [token for step in path for token in step]
            steps.append(self._steps(place))
        return None

    def _seek(self, matcher: Matcher, room: int, limits: Limits) -> list[int] | None:
        """Search by looks of all ids, then by looks of single bytes.

        Ids of several bytes tell more places apart, at times so many that no loop is left.
        """
        half = limits._replace(deadline=(time.thread_time() + limits.deadline) / 2)
        for counted, within in ((None, half), (self.vocabulary.single_bits, limits)):
            found = self._seek_by(matcher, room, within, counted)
            if found is not None:
                return found
        return None

    def _seek_by(
        self, matcher: Matcher, room: int, limits: Limits, counted: np.ndarray | None
    ) -> list[int] | None:
        """Search depth-first, the least visited look first, to escape loops."""
        nodes, most = limits.nodes, 8 * room + 64
        seen: Counter[Look] = Counter()
        levels: list[list[tuple[Matcher, list[int], Look]]] = [
            [(matcher.fork(), [], _look(matcher, counted))]
        ]
        while levels and nodes > 0 and not limits.over():
            if not levels[-1]:
                levels.pop()
                continue
            place, path, look = levels[-1].pop()
            if look[1]:
                return path
            seen[look] += 1
            if len(path) >= most:
                continue
            children: dict[Look, tuple[Matcher, list[int], Look]] = {}
            for step in self._steps(place):
                after = place.fork()
                nodes -= 1
                if go(after, step):
                    found = _look(after, counted)
                    children.setdefault(found, (after, [*path, *step], found))
            # The first of equals ends soonest, so it is taken first.
            ordered = sorted(children.values(), key=lambda child: seen[child[2]])
            levels.append(ordered[::-1])
        return None


def _suffixes(length: int, likely: int, consumed: int) -> Iterator[int]:
    """Yield starts of suffixes: near the added text, then from the shortest suffix on."""
    near = [likely, consumed, consumed - 1, consumed + 1]
    first = [start for start in dict.fromkeys(near) if 0 <= start < length]
    yield from first
    yield from (start for start in range(length - 1, -1, -1) if start not in first)


def _look(matcher: Matcher, counted: np.ndarray | None = None) -> Look:
    row = matcher.allowed()
    return (row if counted is None else row & counted).tobytes(), matcher.complete()


def go(matcher: Matcher, ids: tuple[int, ...] | list[int]) -> bool:
    """Accept all ids, or none."""
    for count, token in enumerate(ids):
        if not matcher.accept(token):
            matcher.rollback(count)
            return False
    return True


def taken(matcher: Matcher, ids: list[int]) -> int:
    """Count leading ids that the grammar takes; the matcher stays."""
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
