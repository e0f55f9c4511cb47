"""Keep the rows of preempted requests until they come back.

vLLM's model runner frees the slots of finished and of preempted requests by one call,
which gets only an id. So the scheduler marks the ids
(:func:`dllm_plugin.config.worker_carriers.pack_departures`). A plain id is that of a request
about to be added, since vLLM first removes a request of the same name, or of vLLM's own
warm-up: for neither is anything kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class PreemptedRows:
    """Keep one row of each state table per preempted request.

    First come, first served preempts few requests. Priorities may preempt more: beyond `most` the
    oldest rows are dropped, and their request decodes its open blocks again.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[str, tuple[Tensor, ...]] = {}
        self._returning: list[tuple[int, tuple[Tensor, ...]]] = []

    def keep(self, req_id: str, rows: tuple[Tensor, ...]) -> None:
        """Store copies of the rows of a slot, which another request takes."""
        self._kept[str(req_id)] = rows
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

        Rows are for the text they were kept at, so they are left out if the request starts
        elsewhere or had ended. That is decided on the device.
        """
        for slot, kept in self._returning:
            start, ended = kept[:2]
            continues = (start == tables[0][slot]) & ~ended
            # A table that was added meanwhile has nothing to restore.
            for table, row in zip(tables, kept, strict=False):
                table[slot] = torch.where(continues, row, table[slot])
        self._returning.clear()
