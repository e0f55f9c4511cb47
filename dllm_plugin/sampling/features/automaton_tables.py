"""Store the automata of running requests on the device, each once.

Letters as in :mod:`dllm_plugin.kernels.automaton.reference`.
"""

from collections.abc import Hashable

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.grammar.automaton import TokenAutomaton
from dllm_plugin.kernels.automaton.reference import FAR, Tables

# Tables with more than this many times the needed room are made again: a step computes all of it.
SPARE = 4


class AutomatonTables:
    """Store automata by a key, all padded to one size that fits the largest.

    tables  what kernels read; None before the first automaton
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tables: Tables | None = None
        self._places: dict[Hashable, int] = {}
        self._stored: list[tuple[Hashable, TokenAutomaton] | None] = []
        self._users: list[int] = []
        # States, classes and edges that there is room for.
        self._sizes = (1, 1, 1)

    def add(self, key: Hashable, automaton: TokenAutomaton) -> int:
        """Store an automaton for one more user; return its place."""
        if key in self._places:
            place = self._places[key]
            self._users[place] += 1
            return place
        if None not in self._stored:
            self._stored.append(None)
            self._users.append(0)
        place = self._stored.index(None)
        self._stored[place] = (key, automaton)
        self._users[place] = 1
        self._places[key] = place
        needed = np.max([one[1].sizes for one in self._stored if one], axis=0)
        room = np.array(self._sizes)
        fits = bool(((needed <= room) & (needed * SPARE >= room)).all())
        if self.tables is not None and place < len(self.tables.far_AQ) and fits:
            for table, row in zip(self.tables, self._padded(automaton), strict=True):
                async_tensor_h2d(row, out=table[place])
        else:
            states, classes, edges = (_power_of_two(int(size)) for size in needed)
            self._sizes = states, classes, edges
            self._make()
        return place

    def release(self, place: int) -> None:
        """Free an automaton after its last user; its rows stay until another one needs them."""
        self._users[place] -= 1
        stored = self._stored[place]
        if not self._users[place] and stored is not None:
            del self._places[stored[0]]
            self._stored[place] = None

    def _make(self) -> None:
        """Make the tables of all automata; rows without an automaton are copies."""
        spare = next(one for one in self._stored if one is not None)
        rows = [self._padded((one or spare)[1]) for one in self._stored]
        rows += [rows[0]] * (_power_of_two(len(rows)) - len(rows))
        columns = []
        for column in zip(*rows, strict=True):
            columns.append(async_tensor_h2d(np.stack(column), device=self.device))
        self.tables = Tables(*columns)

    def _padded(self, automaton: TokenAutomaton) -> list[np.ndarray]:
        """Return an automaton's arrays at the size of the tables."""
        states, classes, edges = self._sizes
        width = len(automaton.class_V)
        lengths = (width, width, classes + 1, edges, edges, edges, states + 1, states)
        ends = (0, 0, width, 0, 0, 0, automaton.sizes[2], FAR)
        padded = []
        for array, length, end in zip(automaton, lengths, ends, strict=True):
            row = np.full(length, end, dtype=np.int32)
            row[: len(array)] = array
            padded.append(row)
        return padded


def _power_of_two(size: int) -> int:
    """Return the next power of two, or `size` if it is a power."""
    return 1 << (size - 1).bit_length()
