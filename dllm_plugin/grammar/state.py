"""Follow one request's grammar: check its canvas from left to right, and keep a closing.

*Run*: leading decided positions that the grammar takes. *Settled*: leading positions of the run
after which a closing fits the budget. *Frontier*: the position after settled and forced ids.
*Draft*: a decided position after the frontier; it is checked when the run reaches it.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .automaton import DEAD, START, Guide
from .chart import Chart
from .closings import Limits, Searcher, closes, go, taken
from .matchers import Matcher
from .vocabulary import LONGEST, Vocabulary, pack

NODES = 400  # places of each search during a step
# Times as many for the first closing, which is searched before the request runs.
FIRST = 20
FIRST_SECONDS = 2.0
STEP_SECONDS = 0.2
CLOCK = 3.0  # times as long by the clock, for shared processors
REQUEST_SECONDS = 2.0  # all searches of a request during its steps


class GrammarCheck(NamedTuple):
    """Return what a step may rely on, as ids from the first uncommitted position on.

    settled   ids of the leading positions, whatever the canvas holds
    forced    ids of the positions after them
    allowed   packed bits of the ids of the frontier; None if nothing is left to choose
    must      the frontier has to be decided by the step
    rejected  a draft was refused: what is decided after the forced ids is dropped
    """

    settled: list[int]
    forced: list[int]
    allowed: np.ndarray | None
    must: bool
    rejected: bool


class DeadEnd(ValueError):
    """Report that no id may follow, and that the text cannot end."""


class GrammarState:
    """Follow one request's grammar along its committed text.

    matcher      at the end of the committed text between two calls
    left         ids that may still be emitted
    completes    the text will be complete: `witness` is known
    witness      ids that complete the committed text, at most `left` of them
    careful      a draft of the first block was refused: the frontier is decided in every step
    num_refused  drafts that were refused; `searches` and `seconds` what closings took
    """

    def __init__(
        self,
        matcher: Matcher,
        vocabulary: Vocabulary,
        stops: Sequence[int],
        left: int,
        *,
        writes: bool = True,
        guide: Guide | None = None,
        chart: Chart | None = None,
    ) -> None:
        """Start before the first id.

        Args:
            stops: ids that end a text; the first of them is taken if there is a choice.
            writes: whether forced ids are written at all, or are the frontier's only choice.
            guide: knows the shortest closings, if the grammar is regular.
            chart: knows closings by the rules of the grammar, if they can be read.
        """
        self.matcher, self.vocabulary = matcher, vocabulary
        self.searcher = Searcher(vocabulary)
        self.guide = guide
        # Of the guide, after the committed text.
        self._place = DEAD if guide is None else START
        self.chart = chart
        # Of the chart: before `_unfollowed`, committed ids that no closing has asked for yet.
        self._chart_place = None if chart is None else chart.start()
        self._unfollowed: list[int] = []
        self.stops = list(stops)
        self.left = left
        self.writes = writes
        self._stop_bits = self._bits(self.stops)
        self.ended = False
        self.completes = False
        self.witness: list[int] = []
        self.careful = False
        self.num_refused = self.searches = 0
        self.seconds = 0.0
        # The frontier whose choice has not been checked yet.
        self._chosen_at = -1
        # A place where a choice left no room, so the closing goes on there.
        self._closes_at = -1

    def find_closing(
        self, known: list[int] | None = None, searches: bool = True
    ) -> None:
        """Use a closing that another request with this grammar has found, or find one."""
        guided = self._guided(self._place, self.left)
        known = known if guided is None else guided
        if known is not None and not (
            len(known) <= self.left and closes(self.matcher, known)
        ):
            known = None
        limits = Limits.within(NODES * FIRST, FIRST_SECONDS, CLOCK)
        if known is None:
            known = self._charted([], self.left, limits)
        if known is None and searches:
            known = self.searcher.search(self.matcher, self.left, limits)
        self.completes = known is not None
        self.witness = known or []
        if not self.matcher.complete() and not self._allowed().any():
            raise DeadEnd("the grammar allows no text that this tokenizer can spell")

    def check(self, canvas: Sequence[int]) -> GrammarCheck:
        """Check a canvas: ids from the first uncommitted position on, -1 if undecided."""
        run, stopped = self._run(canvas)
        if stopped:
            self.matcher.rollback(run - 1)
            return GrammarCheck(list(canvas[:run]), [], None, False, False)
        limits = self._limits()
        at = self._settle(canvas, run, limits)
        settled = list(canvas[:at])
        forced, final = self._forced(settled, run, limits)
        front = at + len(forced)
        allowed = None
        if not final and front < self.left:
            go(self.matcher, forced)
            allowed = self._allowed().copy()
            self.matcher.rollback(len(forced))
        self.matcher.rollback(at)
        refused = at < min(len(canvas), self.left) and canvas[at] >= 0
        rejected = refused and not (forced and forced[0] == canvas[at])
        self.careful = self.careful or rejected
        self.num_refused += rejected
        if forced and not self.writes:
            front, allowed, forced = at, self._bits(forced[:1]), []
            must = True
        else:
            must = self.careful
        if allowed is not None and not allowed.any():
            raise DeadEnd("the grammar allows no id here that this tokenizer can spell")
        self._chosen_at = front
        return GrammarCheck(settled, forced, allowed, must, rejected)

    def commit(self, ids: Sequence[int]) -> bool:
        """Follow emitted ids; return whether all of them were settled or forced."""
        for token in ids:
            if self.ended:
                return False
            if token in self.stops and self.matcher.complete():
                self.ended = True
            elif not self.matcher.accept(token):
                return False
        if self.completes and not self.ended:
            if self.witness[: len(ids)] != list(ids):
                # Neither settled nor forced: nobody knows a closing any more.
                return False
            self.witness = self.witness[len(ids) :]
        self._place = self._place_after(ids)
        self._unfollowed += ids
        self.left -= len(ids)
        self._chosen_at -= len(ids)
        self._closes_at -= len(ids)
        self.careful = self.careful and not ids
        return True

    def _run(self, canvas: Sequence[int]) -> tuple[int, bool]:
        """Accept leading ids; return their number, and whether the last id ends the text."""
        run = 0
        for token in canvas[: self.left]:
            if token < 0:
                break
            if token in self.stops and self.matcher.complete():
                return run + 1, True
            if token >= self.vocabulary.size or not self.matcher.accept(token):
                break
            run += 1
        return run, False

    def _settle(self, canvas: Sequence[int], run: int, limits: Limits) -> int:
        """Go back to the last place of the run after which a closing fits; return it."""
        if not self.completes:
            return run
        ids = list(canvas[:run])
        while self.witness[:run] != ids[:run]:
            found = self._close(ids[:run], limits)
            if found is not None:
                self.witness = [*ids[:run], *found]
                break
            self.matcher.rollback(1)
            run -= 1
        return run

    def _limits(self) -> Limits:
        """Return the limits of the searches of one check, from now on."""
        seconds = min(STEP_SECONDS, REQUEST_SECONDS - self.seconds)
        return Limits.within(NODES, seconds, CLOCK)

    def _place_after(self, ids: Sequence[int]) -> int:
        """Return the guide's state after the committed text and ids."""
        if self.guide is None or not ids:
            return self._place
        return self.guide.follow(self._place, ids)[-1]

    def _guided(self, place: int, room: int) -> list[int] | None:
        """Return the shortest closing; None if it does not fit, or the guide does not know it."""
        if self.guide is None or place == DEAD or self.guide.distance(place) > room:
            return None
        found = self.guide.closing(place)
        return found if closes(self.matcher, found) else None

    def _charted(self, ids: list[int], room: int, limits: Limits) -> list[int] | None:
        """Return the chart's closing after ids; None if it does not fit, or is not known."""
        if self.chart is None or room < 0:
            return None
        place = self._chart_place
        if self._unfollowed:
            place = self.chart.follow(place, self._unfollowed, limits)
            if place is None and limits.over():
                return None
            self._chart_place, self._unfollowed = place, []
        place = self.chart.follow(place, ids, limits)
        # A closing of more bytes than ids are left may still fit.
        text = None if place is None else self.chart.closing(place, LONGEST * room)
        if text is None:
            return None
        return self.searcher.closing_of(self.matcher, text, room)

    def _rest(self, ids: list[int], room: int) -> list[int] | None:
        """Return the rest of the known closing; None if it does not begin with ids or fit."""
        if self.matcher.complete():
            return []
        begun, rest = self.witness[: len(ids)], self.witness[len(ids) :]
        if begun != ids or len(rest) > room or not closes(self.matcher, rest):
            return None
        return rest

    def _close(self, ids: list[int], limits: Limits) -> list[int] | None:
        """Return a closing after ids: the guide's, the rest of the known one, or another."""
        room = self.left - len(ids)
        place = self._place_after(ids)
        found = self._guided(place, room)
        if found is None:
            found = self._rest(ids, room)
        if found is not None or room < 0:
            return found
        if (
            self.guide is not None
            and place != DEAD
            and self.guide.distance(place) > room
        ):
            return None
        if limits.over() or self.seconds >= REQUEST_SECONDS:
            return None
        began = time.thread_time()
        found = self._charted(ids, room, limits)
        if found is None:
            found = self.searcher.search(self.matcher, room, limits)
            self.searches += 1
        self.seconds += time.thread_time() - began
        return found

    def _forced(
        self, settled: list[int], run: int, limits: Limits
    ) -> tuple[list[int], bool]:
        """Return ids that the step writes after the settled ids, and whether they end the text.

        The stop token, if nothing else may follow; the closing, if it takes the rest of the budget,
        or if the model's choice left no room for a closing; else text that must follow.
        """
        at = len(settled)
        room = self.left - at
        if room <= 0:
            return [], True
        complete = self.matcher.complete()
        if complete and not (self._allowed() & ~self._stop_bits).any():
            return self.stops[:1], True
        if self.completes:
            closing = self.witness[at:]
            if len(closing) == room:
                return closing, True
            if (run > at and self._chosen_at == at) or self._closes_at == at:
                self._closes_at = at
                return (closing[:1], False) if closing else (self.stops[:1], True)
        if complete or not self.writes:
            return [], False
        return self._jump(settled, room, limits), False

    def _jump(self, settled: list[int], room: int, limits: Limits) -> list[int]:
        """Return the ids of text that must follow, less the last, which may merge with more."""
        text = self.searcher.forced_text(self.matcher)
        if len(text) < 2:
            return []
        ids = (self.vocabulary.encode(text) or self.vocabulary.cut(text))[:-1]
        ids = ids[: min(taken(self.matcher, ids), room)]
        if not ids or not self.completes:
            return ids
        go(self.matcher, ids)
        after = self._close([*settled, *ids], limits)
        self.matcher.rollback(len(ids))
        if after is None:
            return []
        self.witness = [*settled, *ids, *after]
        return ids

    def _allowed(self) -> np.ndarray:
        """Return which ids may follow, with stop tokens if the text may end."""
        row = self.matcher.allowed()
        if self.matcher.complete():
            row |= self._stop_bits
        return row

    def _bits(self, ids: list[int]) -> np.ndarray:
        flags = np.zeros(self.vocabulary.size, dtype=bool)
        flags[ids] = True
        return pack(flags, self.vocabulary.words)
