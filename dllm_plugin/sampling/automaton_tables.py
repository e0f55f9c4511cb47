"""Hold the automata of running requests on the device, each once. Letters as in their kernels."""

from collections.abc import Hashable

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.grammar.automaton import FAR, TokenAutomaton
from dllm_plugin.kernels.automaton.reference import Tables

# Tables of more than so many times the needed room are made smaller: a step computes all of it.
SPARE = 4


class AutomatonTables:
    """Hold automata by a key, padded alike; made anew when they need more room, or far less.

    tables  what kernels read; None before the first automaton
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tables: Tables | None = None
        self._places: dict[Hashable, int] = {}
        self._held: list[tuple[Hashable, TokenAutomaton] | None] = []
        self._users: list[int] = []
        self._sizes = (1, 1, 1)  # states, classes and edges that there is room for

    def add(self, key: Hashable, automaton: TokenAutomaton) -> int:
        """Hold an automaton for one more user; return its place."""
        if key in self._places:
            place = self._places[key]
            self._users[place] += 1
            return place
        if None not in self._held:
            self._held.append(None)
            self._users.append(0)
        place = self._held.index(None)
        self._held[place], self._users[place] = (key, automaton), 1
        self._places[key] = place
        needed = [max(s) for s in zip(*(one[1].sizes for one in self._held if one), strict=True)]
        grows = self.tables is None or place >= len(self.tables.far_AQ)
        pairs = list(zip(needed, self._sizes, strict=True))
        if grows or any(size > room or size * SPARE < room for size, room in pairs):
            states, classes, edges = (1 << (size - 1).bit_length() for size in needed)
            self._sizes = states, classes, edges
            self._make()
        else:
            assert self.tables is not None
            for table, row in zip(self.tables, self._padded(automaton), strict=True):
                async_tensor_h2d(row, out=table[place])
        return place

    def release(self, place: int) -> None:
        """Forget an automaton once nobody uses it; its rows stay until another one takes them."""
        self._users[place] -= 1
        held = self._held[place]
        if not self._users[place] and held is not None:
            del self._places[held[0]]
            self._held[place] = None

    def _make(self) -> None:
        """Make the tables of all automata; rows of none are copies of another one's."""
        spare = next(held for held in self._held if held is not None)
        rows = 1 << (len(self._held) - 1).bit_length()
        held = [*self._held, *([None] * (rows - len(self._held)))]
        columns = zip(*(self._padded((one or spare)[1]) for one in held), strict=True)
        self.tables = Tables(
            *(async_tensor_h2d(np.stack(column), device=self.device) for column in columns)
        )

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
