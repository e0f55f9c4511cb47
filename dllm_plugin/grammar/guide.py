"""Read the shortest closing of a text off a token automaton.

It is exact. A backend's grammar may take texts that the automaton does not know.
"""

from collections.abc import Sequence

import numpy as np

from dllm_plugin.grammar.automaton import DEAD, START, TokenAutomaton


class Guide:
    """Follow an automaton, and close texts by it.

    automaton what is followed
    key_E     source and class of each edge as one number, in their order
    target_E  the state that the edge leads to
    """

    def __init__(self, automaton: TokenAutomaton) -> None:
        self.automaton = automaton
        self._class_V, self._far_Q = automaton.class_V, automaton.far_Q
        self._first_K = automaton.order_V[
            automaton.bound_K1[:-1] % len(automaton.order_V)
        ]
        self._num_classes = len(automaton.bound_K1) - 1
        key_E = (
            automaton.source_E.astype(np.int64) * self._num_classes + automaton.class_E
        )
        order_E = key_E.argsort(kind="stable")
        self._key_E, self._target_E = key_E[order_E], automaton.target_E[order_E]

    def follow(self, state: int, ids: Sequence[int]) -> list[int]:
        """Return the state after each id; DEAD after ids that the automaton does not know."""
        states = []
        for token in ids:
            state = self._behind(state, token)
            states.append(state)
        return states

    def _behind(self, state: int, token: int) -> int:
        if state < START or not 0 <= token < len(self._class_V):
            return DEAD
        key = state * self._num_classes + int(self._class_V[token])
        place = int(self._key_E.searchsorted(key))
        found = place < len(self._key_E) and int(self._key_E[place]) == key
        return int(self._target_E[place]) if found else DEAD

    def distance(self, state: int) -> int:
        """Return how many ids a text lacks at least, after a state that is not DEAD."""
        return int(self._far_Q[state])

    def closing(self, state: int) -> list[int]:
        """Return the fewest ids that complete the text."""
        ids = []
        while self._far_Q[state] > 0:
            bounds = [state * self._num_classes, (state + 1) * self._num_classes]
            low, high = self._key_E.searchsorted(bounds).tolist()
            # Only complete texts lead to END, and their distance is 0 here.
            far = self._far_Q[self._target_E[low:high]]
            edge = low + int(far.argmin())
            ids.append(int(self._first_K[self._key_E[edge] % self._num_classes]))
            state = int(self._target_E[edge])
        return ids
