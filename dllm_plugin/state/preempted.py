"""Keep the rows of preempted requests until they come back.

vLLM's model runner frees the slots of finished and of preempted requests by one call, which is
given an id and nothing else. The scheduler knows which is which, so it sends the ids themselves as
:class:`FinishedId` and :class:`PreemptedId`. A plain id is that of a request about to be added
(vLLM first removes what has its name) or of vLLM's own warm-up: for neither is anything kept.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Change = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


class PreemptedId(str):
    """Name a preempted request; equal to its plain id."""

    __slots__ = ()


class ResumedId(str):
    """Name a request that comes back; `pieces` are the ends of what it had committed, absolute.

    Where canvases float, the keys of a text depend on the pieces in which it was committed.
    """

    pieces: tuple[int, ...]

    def __new__(cls, req_id: str, pieces: tuple[int, ...] = ()) -> "ResumedId":
        """Make the id; a copy in another process gets its pieces behind it."""
        made = super().__new__(cls, req_id)
        made.pieces = pieces
        return made


class FinishedId(str):
    """Name a request that ended or was aborted, running or waiting; equal to its plain id."""

    __slots__ = ()


class BrokenId(FinishedId):
    """Name a request whose logits were no numbers; `pages` are those that it alone held."""

    pages: tuple[int, ...]

    def __new__(cls, req_id: str, pages: tuple[int, ...] = ()) -> "BrokenId":
        """Make the id; a copy in another process gets its pages behind it."""
        made = super().__new__(cls, req_id)
        made.pages = pages
        return made


class PreemptedRows:
    """Keep one row of each state table per preempted request.

    First come, first served preempts few requests. Priorities may preempt more: beyond `most` the
    oldest rows are dropped, and their request decodes its open blocks again.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[str, tuple[Tensor, ...]] = {}
        self._returning: list[tuple[int, tuple[Tensor, ...]]] = []

    def keep(
        self,
        req_id: str,
        tables: Sequence[Tensor],
        slot: int,
        change: Change | None = None,
    ) -> None:
        """Copy the rows of `slot`, before another request takes it; `change` may replace them."""
        rows = tuple(table[slot].clone() for table in tables)
        self._kept[str(req_id)] = rows if change is None else change(rows)
        if len(self._kept) > self.most:
            del self._kept[next(iter(self._kept))]

    def forget(self, req_id: str) -> None:
        """Drop the rows of a request that will not come back."""
        self._kept.pop(req_id, None)

    def bring_back(self, req_id: str, slot: int) -> None:
        """Stage the rows of a request for its new slot, if they were kept."""
        kept = self._kept.pop(req_id, None)
        if kept is not None:
            self._returning.append((slot, kept))

    def restore(self, tables: Sequence[Tensor]) -> None:
        """Write the staged rows into tables whose first two are `start_N` and `ended_N`.

        Rows are for the text they were kept at, so they are left out where the request starts
        elsewhere or had ended. That is decided on the device.
        """
        for slot, kept in self._returning:
            start, ended = kept[:2]
            continues = (start == tables[0][slot]) & ~ended
            # A table that was added meanwhile has nothing to restore.
            for table, row in zip(tables, kept, strict=False):
                table[slot] = torch.where(continues, row, table[slot])
        self._returning.clear()
