"""Follow a request's grammar if causal forwards verify drafts.

The grammar restricts each row by the text before its position, so the text is that of causal
decoding under the grammar, whatever was drafted. The first id of a canvas was chosen by the
forward before: it is final if the text can still be completed after it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .state import DeadEnd, GrammarState
from .step import NO_ID, RowsPayload


class RowCheck(NamedTuple):
    """Return what the rows of one canvas may choose; places count from its start.

    settled  how many leading ids the grammar accepts, with a closing after each
    forced   id that replaces the first id; NO_ID: none
    first    place of the first row
    rows     packed bits of the ids that each row may choose
    """

    settled: int
    forced: int
    first: int
    rows: list[np.ndarray]


class VerifiedState(GrammarState):
    """Follow one request's grammar along its committed text, and along the drafts after it.

    A closing depends on the text and on the closing before its last id, never on drafts.

    _ids       settled ids of the last check
    _closings  the closing before the first of them, and after each
    """

    _ids: list[int]
    _closings: list[list[int]]

    def check(self, canvas: Sequence[int]) -> RowCheck:  # type: ignore[override]
        """Check ids from the first uncommitted position on, -1 if undecided."""
        self._ids, self._closings = [], [self.witness]
        if not canvas or canvas[0] < 0:
            return RowCheck(0, NO_ID, 0, [self._row()])
        rows = []
        accepted = 0
        for token in canvas[: self.left]:
            if token in self.stops and self.matcher.complete():
                self._keep(token, [])
                break
            if not self._accepts(token):
                break
            accepted += 1
            if accepted < self.left:
                rows.append(self._row())
        self.matcher.rollback(accepted)
        self.witness = self._closings[0]
        forced = NO_ID if self._ids else self._forced_id()
        self.num_refused += forced != NO_ID
        return RowCheck(len(self._ids), forced, 1, rows)

    def commit(self, ids: Sequence[int]) -> bool:
        """Follow emitted ids; return whether the grammar accepts all of them."""
        count = 0
        # The last id may be another than the draft in its place.
        while count < min(len(ids), len(self._ids)) and ids[count] == self._ids[count]:
            count += 1
        self.witness = [*self._ids[:count], *self._closings[count]]
        self._ids, self._closings = self._ids[count:], self._closings[count:]
        return super().commit(ids)

    def _accepts(self, token: int) -> bool:
        """Accept an id if the text can still be completed after it."""
        if not 0 <= token < self.vocabulary.size or not self.matcher.accept(token):
            return False
        closing: list[int] | None = []
        if self.completes:
            closing = self._close([*self._ids, token], self._limits())
        if closing is None:
            self.matcher.rollback(1)
            return False
        self._keep(token, closing)
        return True

    def _keep(self, token: int, closing: list[int]) -> None:
        """Add an id to the settled ids."""
        self._ids.append(token)
        self._closings.append(closing)
        # The next closing may be the rest of this closing.
        self.witness = [*self._ids, *closing]

    def _row(self) -> np.ndarray:
        """Return the ids that may follow the settled ids.

        Only the closing may if it takes the rest of the budget. The last id is not checked by
        another forward, so it is the closing, too, or the stop token.
        """
        room = self.left - len(self._ids)
        closing = self._closings[-1]
        if self.completes and (room == 1 or len(closing) == room):
            return self._bits([self._forced_id()])
        allowed = self._allowed().copy()
        if not allowed.any():
            raise DeadEnd("the grammar allows no id here that this tokenizer can spell")
        return allowed

    def _forced_id(self) -> int:
        """Return the id with which the text goes on to its end."""
        if not self.completes:
            raise DeadEnd("the grammar refuses an id that was chosen under it")
        return next(iter(self._closings[-1]), self.stops[0])


def pack_rows(req_ids: Sequence[str], checks: Sequence[RowCheck]) -> RowsPayload:
    """Pack the checks of a step."""
    owners = list[int]()
    places = list[int]()
    rows = list[np.ndarray]()
    for owner, check in enumerate(checks):
        owners += [owner] * len(check.rows)
        places += range(check.first, check.first + len(check.rows))
        rows += check.rows
    return RowsPayload(
        list(req_ids),
        np.array(owners, dtype=np.int64),
        np.array(places, dtype=np.int64),
        np.array(rows, dtype=np.int32),
        np.array([check.settled for check in checks], dtype=np.int64),
        np.array([check.forced for check in checks], dtype=np.int64),
    )
