"""Build the token automaton of a regular grammar: states, classes of ids, edges.

Ids that lead from every state to the same one are a class, so a step of the automaton looks at
classes only. The end of a text is a state of its own: stop tokens lead there from wherever the
text is complete, and keep it there. Each state knows how many ids its text lacks at least, which is
what makes texts complete within a budget.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .byte_states import DEAD, determinise
from .vocabulary import Vocabulary

MAX_BYTE_STATES = 16384
MAX_STATES = 4096
MAX_CLASSES = 4096
MAX_EDGES = 65536
# Of a processor, so that a grammar has an automaton or none whatever else runs.
SECONDS = 6.0  # of building
BYTE_SECONDS = 3.0
END = 0  # the state after a stop token
START = 1
UNUSABLE = 0  # the class of ids that lead nowhere
STOP = 1  # the class of stop tokens
FAR = 2**30  # ids that a text lacks that can never be complete
_ROUNDS = np.random.default_rng(0).integers(
    1, 2**63, MAX_STATES, dtype=np.uint64
) | np.uint64(1)


class TooLarge(ValueError):
    """Report that a grammar has no automaton within the limits."""


class TokenAutomaton(NamedTuple):
    """Store an automaton over ids, all int32; Q states, K classes, E edges.

    class_V    class of each id
    order_V    ids by class, lower ids first
    bound_K1   where a class starts in `order_V`
    source_E   state of each edge; edges are in the order of their targets
    class_E    its class
    target_E   the state that it leads to
    first_Q1   where the edges into a state start
    far_Q      ids that a text lacks here at least
    """

    class_V: np.ndarray
    order_V: np.ndarray
    bound_K1: np.ndarray
    source_E: np.ndarray
    class_E: np.ndarray
    target_E: np.ndarray
    first_Q1: np.ndarray
    far_Q: np.ndarray

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return how many states, classes and edges there are."""
        return len(self.far_Q), len(self.bound_K1) - 1, len(self.source_E)


class ByteAutomaton(NamedTuple):
    """Store an automaton over bytes: int32 ``[S, 256]`` successors, bool ``[S]`` complete."""

    next_SB: np.ndarray
    complete_S: np.ndarray


def byte_automaton(asked: dict[str, object]) -> ByteAutomaton:
    """Return the automaton of a pattern or a schema. Raises TooLarge if there is none."""
    numbers = determinise(asked | {"most": MAX_BYTE_STATES}, BYTE_SECONDS)
    if numbers is None:
        raise TooLarge("the expression is not regular, or has too many states")
    flat = np.frombuffer(numbers, dtype=np.int32)
    size = int(flat[0])
    return ByteAutomaton(flat[1 + size :].reshape(size, 256), flat[1 : 1 + size] > 0)


def build(
    asked: dict[str, object], vocabulary: Vocabulary, stops: list[int]
) -> TokenAutomaton:
    """Build the automaton of a pattern or a schema. Raises TooLarge beyond a limit."""
    deadline = time.thread_time() + SECONDS
    return _over_ids(byte_automaton(asked), vocabulary, stops, deadline)


class _Walk:
    """Walk ids through an automaton over bytes: several states or several ids at once."""

    def __init__(
        self, states: ByteAutomaton, vocabulary: Vocabulary, ids: np.ndarray
    ) -> None:
        self.ids = ids
        pieces = [vocabulary.pieces[i] for i in ids.tolist()]
        self.length_T = np.array([len(piece) for piece in pieces], dtype=np.int64)
        self.start_T = np.cumsum(self.length_T) - self.length_T
        self.text = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        self.next_SB = states.next_SB

    def from_state(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids that may follow a state, by their places, and the states after them."""
        place_T = np.arange(len(self.ids))
        found: list[tuple[np.ndarray, np.ndarray]] = []
        at_T = np.full(len(place_T), state, dtype=np.int32)
        depth = 0
        while len(place_T):
            at_T = self.next_SB[at_T, self.text[self.start_T[place_T] + depth]]
            depth += 1
            alive_T = at_T != DEAD
            whole_T = alive_T & (self.length_T[place_T] == depth)
            found.append((place_T[whole_T], at_T[whole_T]))
            goes_on_T = alive_T & ~whole_T
            place_T, at_T = place_T[goes_on_T], at_T[goes_on_T]
        places, states = zip(*found, strict=True) if found else ((), ())
        if not places:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
        return np.concatenate(places), np.concatenate(states)


def _over_ids(
    states: ByteAutomaton, vocabulary: Vocabulary, stops: list[int], deadline: float
) -> TokenAutomaton:
    """Compose an automaton over bytes with the pieces of a vocabulary."""
    usable_V = ~vocabulary.never
    usable_V[stops] = False
    walk = _Walk(states, vocabulary, np.flatnonzero(usable_V))
    name = {0: START}  # byte states that lie between two ids
    queue = [0]
    columns_T = np.zeros(len(walk.ids), dtype=np.uint64)
    for state in queue:
        if time.thread_time() > deadline:
            raise TooLarge(f"building takes more than {SECONDS:g} s")
        place_T, to_T = walk.from_state(state)
        for found in np.unique(to_T).tolist():
            if found not in name:
                name[found] = START + len(name)
                queue.append(found)
        if START + len(name) > MAX_STATES:
            raise TooLarge(f"more than {MAX_STATES} states")
        # Ids with equal sums over all states are one class: sums of 64 bits replace columns.
        columns_T[place_T] += _ROUNDS[name[state] - START] * (
            to_T.astype(np.uint64) + np.uint64(1)
        )
    useful_T = columns_T != 0
    kinds, member_K, kind_T = np.unique(
        columns_T, return_index=True, return_inverse=True
    )
    # Kinds of ids that lead somewhere follow the two classes that every automaton has.
    rank_K = np.cumsum(kinds != 0) + STOP
    class_V = np.full(vocabulary.size, UNUSABLE, dtype=np.int32)
    class_V[walk.ids[useful_T]] = rank_K[kind_T[useful_T]]
    class_V[stops] = STOP
    members = walk.ids[member_K[kinds != 0]]
    if len(members) + 2 > MAX_CLASSES:
        raise TooLarge(f"{len(members) + 2} classes of ids, at most {MAX_CLASSES}")
    edges = _edges(_Walk(states, vocabulary, members), queue, name)
    complete = [name[state] for state in queue if states.complete_S[state]]
    ends = [(state, STOP, END) for state in (*complete, END)]
    edge_E3 = np.concatenate([edges, np.array(ends, dtype=np.int64)])
    return _ordered(class_V, edge_E3, START + len(name), complete)


def _edges(walk: _Walk, queue: list[int], name: dict[int, int]) -> np.ndarray:
    """Return (source, class, target) of one member of each class, int64 ``[E, 3]``."""
    parts = [np.zeros((0, 3), dtype=np.int64)]
    total = 0
    names = np.full(max(name) + 1, DEAD, dtype=np.int64)
    names[list(name)] = list(name.values())
    for state in queue:
        place_T, to_T = walk.from_state(state)
        source_T = np.full(len(to_T), name[state])
        parts.append(np.stack([source_T, place_T + STOP + 1, names[to_T]], axis=1))
        total += len(to_T)
        if total > MAX_EDGES:
            raise TooLarge(f"more than {MAX_EDGES} edges")
    return np.concatenate(parts)


def _ordered(
    class_V: np.ndarray, edge_E3: np.ndarray, num_states: int, complete: list[int]
) -> TokenAutomaton:
    """Measure how far states are from a complete text, and drop edges that lead to none."""
    far_Q = np.full(num_states, FAR, dtype=np.int64)
    far_Q[[END, *complete]] = 0
    while True:
        closer_Q = far_Q.copy()
        np.minimum.at(closer_Q, edge_E3[:, 0], far_Q[edge_E3[:, 2]] + 1)
        if (closer_Q >= far_Q).all():
            break
        far_Q = np.minimum(closer_Q, far_Q)
    if far_Q[START] >= FAR:
        raise TooLarge("no text that this tokenizer can spell")
    edge_E3 = edge_E3[far_Q[edge_E3[:, 2]] < FAR]
    edge_E3 = edge_E3[np.lexsort((edge_E3[:, 1], edge_E3[:, 0], edge_E3[:, 2]))]
    order_V = np.argsort(class_V, kind="stable")
    num_classes = max(int(class_V.max()), STOP) + 1
    arrays = (
        class_V,
        order_V,
        np.searchsorted(class_V[order_V], np.arange(num_classes + 1)),
        edge_E3[:, 0],
        edge_E3[:, 1],
        edge_E3[:, 2],
        np.searchsorted(edge_E3[:, 2], np.arange(num_states + 1)),
        np.minimum(far_Q, FAR),
    )
    return TokenAutomaton(
        *(np.ascontiguousarray(array, dtype=np.int32) for array in arrays)
    )


class Guide:
    """Follow an automaton, and close texts by it: exactly, as far as it knows a grammar.

    key        equal for equal automata
    automaton  what is followed
    edges      of each state: the state after each class
    """

    def __init__(self, key: str, automaton: TokenAutomaton) -> None:
        self.key, self.automaton = key, automaton
        self._far = automaton.far_Q.tolist()
        self.edges: list[dict[int, int]] = [{} for _ in self._far]
        columns = (automaton.source_E, automaton.class_E, automaton.target_E)
        for source, kind, target in sorted(np.stack(columns, axis=1).tolist()):
            self.edges[source][kind] = target

    def follow(self, state: int, ids: Sequence[int]) -> list[int]:
        """Return the state after each id; DEAD after ids that the automaton does not know."""
        states = []
        class_V = self.automaton.class_V
        for token in ids:
            is_known = state >= START and 0 <= token < len(class_V)
            kind = int(class_V[token]) if is_known else UNUSABLE
            state = self.edges[state].get(kind, DEAD) if is_known else DEAD
            states.append(state)
        return states

    def distance(self, state: int) -> int:
        """Return how many ids a text lacks at least, after a state that is not DEAD."""
        return int(self._far[state])

    def closing(self, state: int) -> list[int]:
        """Return the fewest ids that complete the text."""
        ids, automaton = [], self.automaton
        while self._far[state] > 0:
            edges = self.edges[state]
            kind = min(edges, key=lambda kind: self._far[edges[kind]])
            ids.append(int(automaton.order_V[automaton.bound_K1[kind]]))
            state = edges[kind]
        return ids
