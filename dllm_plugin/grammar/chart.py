"""Follow a text through the rules of a grammar, and find the shortest way to its end.

The chart is that of Earley's algorithm, over networks: it knows every way in which a grammar may
read a text, so what a text lacks is known wherever it stands. A backend may read the grammar
otherwise, so its matcher verifies every closing.
"""

from collections.abc import Iterator, Sequence

from .closings import Limits
from .networks import (
    FAR,
    FINAL,
    NO_RULE,
    UTF8_LIMITS,
    Edge,
    Network,
    cheapest,
    utf8_length,
)
from .patterns import LAST
from .vocabulary import Vocabulary

# Of one place: grammars with more ways to read a text are given up.
MAX_ITEMS = 4000


class Frame:
    """Store who called a rule at one place, and the bytes from its end to that of the text."""

    __slots__ = ("best", "callers", "cost")

    def __init__(self) -> None:
        self.callers: dict[tuple[int, Frame], None] = {}
        self.cost = FAR
        self.best: tuple[int, Frame] | None = None


Item = tuple[int, Frame]  # a node, and the frame of its rule


class Place:
    """Store what a text has reached: items that read characters, and bytes of an unfinished one."""

    __slots__ = ("after", "items", "pending")

    def __init__(self, items: list[Item], pending: bytes = b"") -> None:
        self.items, self.pending = items, pending
        # Places by the id that leads there.
        self.after: dict[int, Place | None] = {}


class Chart:
    """Follow texts of one grammar."""

    def __init__(self, network: Network, start: int, vocabulary: Vocabulary) -> None:
        self.network, self.vocabulary = network, vocabulary
        self._whole = Frame()
        self._whole.cost = 0
        self._is_last_N = [
            network.leads_to_end(node) for node in range(len(network.edges_N))
        ]
        self._first = _Closure(network, self._is_last_N).place([(start, self._whole)])

    def start(self) -> Place | None:
        """Return the place before a text; None if the grammar has no text."""
        # Each request has a place of its own, for places keep those after them.
        return None if self._first is None else Place(self._first.items)

    def follow(
        self, place: Place | None, ids: Sequence[int], limits: Limits
    ) -> Place | None:
        """Return the place after ids; None if the rules do not take them, or the time is up."""
        for token in ids:
            if place is None:
                return None
            if token not in place.after:
                after: Place | None = place
                for byte in self.vocabulary.pieces[token]:
                    if limits.over():
                        return None
                    after = None if after is None else self._step(after, byte)
                place.after[token] = after
            place = place.after[token]
        return place

    def closing(self, place: Place, most: int) -> bytes | None:
        """Return the shortest text that completes the one so far; None beyond `most` bytes."""
        if place.pending:
            return self._finish_character(place, most)
        cost = self.network.cost_N
        item = min(place.items, key=lambda item: cost[item[0]] + item[1].cost)
        if cost[item[0]] + item[1].cost > most:
            return None
        return self._spell(item).encode(errors="surrogatepass")

    def _step(self, place: Place, byte: int) -> Place | None:
        """Return the place after a byte."""
        text = place.pending + bytes([byte])
        low, high = character_range(text)
        reached = self._reached(place, low, high)
        if low < high:
            return Place(place.items, text) if any(reached) else None
        agenda = [(edge.to, frame) for edge, frame in reached]
        return _Closure(self.network, self._is_last_N).place(agenda)

    def _reached(
        self, place: Place, low: int, high: int
    ) -> Iterator[tuple[Edge, Frame]]:
        """Yield edges that read a character from `low` to `high`."""
        for node, frame in place.items:
            for edge in self.network.edges_N[node]:
                for first, last in edge.ranges:
                    if first <= high and low <= last:
                        yield edge, frame
                        break

    def _finish_character(self, place: Place, most: int) -> bytes | None:
        """Return the shortest closing after the first bytes of a character."""
        low, high = character_range(place.pending)
        best: bytes | None = None
        for edge, frame in self._reached(place, low, high):
            cost = self.network.cost_N[edge.to] + frame.cost
            if cost + utf8_length(high) > most:
                continue
            for first, last in edge.ranges:
                code = max(low, first)
                if code <= min(high, last):
                    spelled = chr(code) + self._spell((edge.to, frame))
                    text = spelled.encode(errors="surrogatepass")[len(place.pending) :]
                    if best is None or len(text) < len(best):
                        best = text
                    break
        return best

    def _spell(self, item: Item) -> str:
        """Return the shortest text from an item to the end."""
        node, frame = item
        network = self.network
        signs: list[str] = []
        returns: list[int] = []
        while node != FINAL:
            edge = network.best_N[node]
            if edge is None:  # the end of a rule
                if returns:
                    node = returns.pop()
                else:
                    assert frame.best is not None
                    node, frame = frame.best
                continue
            node = edge.to
            if edge.ranges:
                signs.append(chr(cheapest(edge.ranges)))
            elif edge.rule != NO_RULE:
                returns.append(edge.to)
                node = edge.rule
        return "".join(signs)


class _Closure:
    """Complete the items of one place."""

    def __init__(self, network: Network, is_last_N: list[bool]) -> None:
        self.network, self.is_last_N = network, is_last_N
        self.items: dict[Item, None] = {}
        self.agenda: list[Item] = []
        # Of rules that are called here, by their starts.
        self.frames: dict[int, Frame] = {}
        # Frames that share all callers of one.
        self.heirs: dict[Frame, list[Frame]] = {}
        # Frames whose rule has ended here.
        self.ends: dict[Frame, None] = {}

    def place(self, agenda: list[Item]) -> Place | None:
        """Follow skips, calls and ends; return the place, None if nothing is left or too much."""
        cost = self.network.cost_N
        self.agenda = agenda
        while self.agenda:
            item = self.agenda.pop()
            if item in self.items or cost[item[0]] >= FAR:
                continue
            self.items[item] = None
            if len(self.items) > MAX_ITEMS:
                return None
            self._expand(*item)
        self._measure()
        edges = self.network.edges_N
        kept = []
        for node, frame in self.items:
            if node == FINAL or any(edge.ranges for edge in edges[node]):
                kept.append((node, frame))
        return Place(kept) if kept else None

    def _expand(self, node: int, frame: Frame) -> None:
        if self.network.is_end_N[node]:
            self.ends[frame] = None
            self.agenda += frame.callers
        for edge in self.network.edges_N[node]:
            if edge.rule != NO_RULE:
                self._call(edge, frame)
            elif not edge.ranges:
                self.agenda.append((edge.to, frame))

    def _call(self, edge: Edge, frame: Frame) -> None:
        if self.network.cost_N[edge.to] >= FAR or self.network.cost_N[edge.rule] >= FAR:
            return
        inner = self.frames.get(edge.rule)
        if inner is None:
            inner = self.frames[edge.rule] = Frame()
            self.heirs[inner] = []
            self.agenda.append((edge.rule, inner))
        # A call that ends its rule returns to the callers of that rule: nothing grows with the
        # length of a text that a rule repeats by calling itself last.
        if not self.is_last_N[edge.to]:
            self._add_caller(inner, (edge.to, frame))
            return
        if frame in self.heirs and inner not in self.heirs[frame]:
            self.heirs[frame].append(inner)
        for caller in list(frame.callers):
            self._add_caller(inner, caller)

    def _add_caller(self, frame: Frame, caller: Item) -> None:
        waiting = [frame]
        while waiting:
            frame = waiting.pop()
            if caller in frame.callers:
                continue
            frame.callers[caller] = None
            if frame in self.ends:
                self.agenda.append(caller)
            waiting += self.heirs[frame]

    def _measure(self) -> None:
        """Compute the bytes from the ends of the rules called here to that of the text."""
        cost, improved = self.network.cost_N, True
        while improved:
            improved = False
            for frame in self.frames.values():
                for caller in frame.callers:
                    total = cost[caller[0]] + caller[1].cost
                    if total < frame.cost:
                        frame.cost, frame.best, improved = total, caller, True


def character_range(first: bytes) -> tuple[int, int]:
    """Return the lowest and highest code point whose UTF-8 begins with some bytes; (1, 0): none."""
    lead = first[0]
    if lead < 0x80:
        return lead, lead
    length = 2 + (lead >= 0xE0) + (lead >= 0xF0)
    code = lead & (0x7F >> length)
    for byte in first[1:]:
        code = code << 6 | byte & 0x3F
    missing = 6 * (length - len(first))
    low, high = code << missing, (code + 1 << missing) - 1
    return max(low, UTF8_LIMITS[length - 2]), min(
        high, UTF8_LIMITS[length - 1] - 1, LAST
    )
