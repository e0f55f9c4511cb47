"""Find ids that complete a text within a budget.

A closing is a witness: every id of it was taken by the grammar, and the text may end behind it.
What is missed costs a draft, or the promise that the text ends complete; never validity. Searches
have limits of nodes and of time, since a grammar can be such that none succeeds.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dllm_plugin.grammar.matchers import Matcher
from dllm_plugin.grammar.vocabulary import WORD, Vocabulary, first_set, holds

SIBLINGS = 48  # ids of several bytes that are tried at one place
SHORT = 8  # ids of a closing that no other search would make much shorter
ALIKE = (
    6  # with more bytes of a kind allowed (digits, letters) one of them stands for all
)
KINDS = (
    b"0123456789",
    bytes(range(97, 123)),
    bytes(range(65, 91)),
    bytes(range(128, 256)),
)
LOOKS = (
    1,
    4,
    16,
)  # places that look alike, of which a search by breadth goes on from so many
MOST_FORCED = 64  # bytes of forced text that one look goes on for
SUFFIX_WORK = 1500  # ids that a look at what is left of the last closing may try


Look = tuple[bytes, bool]  # what may follow a place, and whether the text may end there


class Limits(NamedTuple):
    """Bound a search: `nodes` places of each way to search, and when it ends.

    The time is a last resort: with the places alone a search finds the same on any machine. It is
    that of this thread's processor, for beside a busy thread a search mostly waits for Python's
    lock; by the clock it may take longer, but not without end.

    deadline  by `time.thread_time`
    latest    by `time.monotonic`
    """

    nodes: int
    deadline: float
    latest: float

    @classmethod
    def within(cls, nodes: int, seconds: float, clock: float) -> "Limits":
        """Return those of a search that begins now, `clock` times as long by the clock."""
        return cls(
            nodes, time.thread_time() + seconds, time.monotonic() + clock * seconds
        )

    def over(self) -> bool:
        """Tell whether the time is up."""
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

    def remainder(
        self, matcher: Matcher, known: list[int], added: list[int], room: int
    ) -> list[int] | None:
        """Return what is left of a known closing once some ids were added at its beginning."""
        if matcher.complete():
            return []
        if known[: len(added)] == added and len(known) - len(added) <= room:
            rest = known[len(added) :]
            if closes(matcher, rest):
                return rest
        text, new = self.vocabulary.text(known), self.vocabulary.text(added)
        work = SUFFIX_WORK
        for start in _suffixes(
            len(text), len(new) if text.startswith(new) else 0, len(new)
        ):
            if work <= 0:
                return None
            work -= 1 + min(len(text) - start, 64)
            found = self.closing_of(matcher, text[start:], room)
            if found is not None:
                return found
        return None

    def search(self, matcher: Matcher, room: int, limits: Limits) -> list[int] | None:
        """Return a closing of at most `room` ids: depth first, then by breadth, then by depth.

        A long one is compared with what is found by breadth: a text begins to close the later, the
        shorter its closing is.
        """
        best: list[int] | None = None
        attempts = (self._dive, self._seek, self._spread, self._deepen)
        for i, attempt in enumerate(attempts):
            now = time.thread_time()
            share = (limits.deadline - now) / (len(attempts) - i)
            found = attempt(matcher, room, limits._replace(deadline=now + share))
            if found is not None:
                found = self.shorten(matcher, found)
                if len(found) <= room and (best is None or len(found) < len(best)):
                    best = found
            if best is not None and (len(best) <= SHORT or i > 1):
                return best
        return best

    def _steps(
        self, matcher: Matcher, every: bool = False
    ) -> Iterator[tuple[int, ...]]:
        """Yield ids that may follow, what ends soonest first; `every`: also those of one kind."""
        row, order, single = (
            matcher.allowed(),
            self.vocabulary.order,
            self.vocabulary.num_single,
        )
        allowed = holds(row, order[:single])
        chosen = order[:single][
            allowed if every else allowed & ~self._is_alike(allowed)
        ]
        if not len(chosen):
            chosen = order[single:][holds(row, order[single:])][:SIBLINGS]
        for token in chosen.tolist():
            yield (token,)

    def _is_alike(self, allowed: np.ndarray) -> np.ndarray:
        """Mark bytes of a kind of which many are allowed, all but the first: they lead alike."""
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
        """Go down at once, which finds what the usual closers close."""
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
        """Seek by all ids that may follow, then by those of single bytes.

        Ids of several bytes tell more places apart, at times so many that what may be repeated is
        never left.
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
        """Go down to what was seen least, which leaves soon what may be repeated without end."""
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
            # Of equals the first is taken first: it ends soonest.
            ordered = sorted(children.values(), key=lambda child: seen[child[2]])
            levels.append(ordered[::-1])
        return None

    def _spread(self, matcher: Matcher, room: int, limits: Limits) -> list[int] | None:
        """Go by breadth; places that allow the same ids are one, or a few where that finds none."""
        nodes = limits.nodes
        for most in LOOKS:
            found, nodes = self._spread_over(
                matcher, most, limits._replace(nodes=nodes)
            )
            if found is not None:
                return found
        return None

    def _spread_over(
        self, matcher: Matcher, most: int, limits: Limits
    ) -> tuple[list[int] | None, int]:
        """Return a closing by breadth, and how many places are left to look at.

        Two places that allow the same ids may differ: what follows a bracket and what follows a
        colon both begin with a quote.
        """
        start = matcher.fork()
        queue: deque[tuple[Matcher, list[int]]] = deque([(start, [])])
        seen, nodes = Counter([_look(start)]), limits.nodes
        while queue and nodes > 0 and not limits.over():
            place, path = queue.popleft()
            if place.complete():
                return path, nodes
            for step in self._steps(place, every=most == 1):
                after = place.fork()
                nodes -= 1
                if not go(after, step):
                    continue
                if after.complete():
                    return [*path, *step], nodes
                look = _look(after)
                seen[look] += 1
                if seen[look] <= most:
                    queue.append((after, [*path, *step]))
        return None, nodes

    def _deepen(self, matcher: Matcher, room: int, limits: Limits) -> list[int] | None:
        """Go down to a depth that doubles; siblings that look alike are one."""
        most, nodes = 8, limits.nodes
        while most < 16 * room + 64 and nodes > 0 and not limits.over():
            found, nodes = self._within(matcher, most, limits._replace(nodes=nodes))
            if found is not None:
                return found
            most *= 2
        return None

    def _within(
        self, matcher: Matcher, most: int, limits: Limits
    ) -> tuple[list[int] | None, int]:
        """Return a closing of at most `most` steps, and how many places are left to look at."""
        stack: list[tuple[Matcher, list[int]]] = [(matcher.fork(), [])]
        nodes = limits.nodes
        while stack and nodes > 0 and not limits.over():
            place, path = stack.pop()
            nodes -= 1
            if place.complete():
                return path, nodes
            if len(path) >= most:
                continue
            seen, children = set(), []
            for step in self._steps(place):
                after = place.fork()
                if not go(after, step):
                    continue
                look = _look(after)
                if look not in seen:
                    seen.add(look)
                    children.append((after, [*path, *step]))
            stack += children[::-1]
        return None, nodes


def _suffixes(length: int, likely: int, consumed: int) -> Iterator[int]:
    """Yield where suffixes start: near what was added, then from the shortest one on."""
    near = [likely, consumed, consumed - 1, consumed + 1]
    first = [start for start in dict.fromkeys(near) if 0 <= start < length]
    yield from first
    yield from (start for start in range(length - 1, -1, -1) if start not in first)


def _look(matcher: Matcher, counted: np.ndarray | None = None) -> Look:
    row = matcher.allowed()
    return (row if counted is None else row & counted).tobytes(), matcher.complete()


def go(matcher: Matcher, ids: tuple[int, ...] | list[int]) -> bool:
    """Go on by all of some ids, or stay."""
    for count, token in enumerate(ids):
        if not matcher.accept(token):
            matcher.rollback(count)
            return False
    return True


def taken(matcher: Matcher, ids: list[int]) -> int:
    """Return how many leading ids the grammar takes; the matcher stays."""
    count = 0
    for token in ids:
        if not matcher.accept(token):
            break
        count += 1
    matcher.rollback(count)
    return count


def closes(matcher: Matcher, ids: list[int]) -> bool:
    """Tell whether ids complete the text; the matcher stays."""
    if not go(matcher, ids):
        return False
    done = matcher.complete()
    matcher.rollback(len(ids))
    return done
