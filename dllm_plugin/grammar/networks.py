"""Store the rules of a grammar as graphs over characters, with the shortest way to their ends.

An edge is a skip, reads a character, or calls a rule and goes on once that rule has ended. Costs
are bytes of UTF-8: no token spells less than a byte, so a text has at most so many ids.
"""

import heapq
from typing import NamedTuple

from .patterns import LAST, Ranges

NO_RULE = -1
FINAL = 0  # the node after the whole text
FAR = 1 << 60  # bytes to an end that cannot be reached
MAX_NODES = 60_000
# Characters that a closing prefers: digits and letters mean nothing in particular.
PREFERRED = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-. "
# First code points with one more byte.
UTF8_LIMITS = (0x80, 0x800, 0x10000, LAST + 1)


class Unreadable(ValueError):
    """Report a grammar that has no network: too large, or with unknown syntax."""


class Edge(NamedTuple):
    """Lead to the node `to`: by a character of `ranges`, or after the rule at `rule`."""

    to: int
    ranges: tuple[tuple[int, int], ...] = ()
    rule: int = NO_RULE


class Part(NamedTuple):
    """Name the first and the last node of a part of a rule."""

    start: int
    end: int


def utf8_length(code: int) -> int:
    """Return the bytes of a code point in UTF-8."""
    return next(i for i, limit in enumerate(UTF8_LIMITS, 1) if code < limit)


def cheapest(ranges: tuple[tuple[int, int], ...]) -> int:
    """Return a code point of as few bytes as possible, letters and digits first."""
    lowest = ranges[0][0]
    if lowest >= 128:
        return lowest
    for code in PREFERRED:
        for low, high in ranges:
            if low <= code <= high:
                return code
    return lowest


class Network:
    """Build the graphs of all rules; :meth:`measure` computes the costs.

    edges_N     edges from each node
    is_end_N    whether the node is the last of its rule
    cost_N      bytes from the node to the end of its rule, FAR if there is no way
    best_N      the first edge of such a way
    """

    def __init__(self) -> None:
        self.edges_N: list[list[Edge]] = []
        self.is_end_N: list[bool] = []
        self.cost_N: list[int] = []
        self.best_N: list[Edge | None] = []
        self.add_node()  # FINAL

    def add_node(self) -> int:
        """Add a node without edges. Raises Unreadable if there are too many."""
        if len(self.edges_N) >= MAX_NODES:
            raise Unreadable(f"more than {MAX_NODES} nodes")
        self.edges_N.append([])
        self.is_end_N.append(False)
        return len(self.edges_N) - 1

    def add_rule(self) -> Part:
        """Add a rule whose two nodes are to be connected."""
        rule = Part(self.add_node(), self.add_node())
        self.is_end_N[rule.end] = True
        return rule

    def skip(self, source: int, to: int) -> None:
        """Add an edge that reads nothing."""
        self.edges_N[source].append(Edge(to))

    def empty(self) -> Part:
        """Return a part that reads nothing."""
        node = self.add_node()
        return Part(node, node)

    def characters(self, ranges: Ranges) -> Part:
        """Return a part that reads one character."""
        part = Part(self.add_node(), self.add_node())
        if ranges:
            self.edges_N[part.start].append(Edge(part.end, tuple(ranges)))
        return part

    def call(self, rule: Part) -> Part:
        """Return a part that reads what a rule reads."""
        part = Part(self.add_node(), self.add_node())
        self.edges_N[part.start].append(Edge(part.end, rule=rule.start))
        return part

    def sequence(self, parts: list[Part]) -> Part:
        """Return a part that reads what parts read, one after the other."""
        if not parts:
            return self.empty()
        for i in range(len(parts) - 1):
            self.skip(parts[i].end, parts[i + 1].start)
        return Part(parts[0].start, parts[-1].end)

    def either(self, parts: list[Part]) -> Part:
        """Return a part that reads what one of some parts reads."""
        if len(parts) == 1:
            return parts[0]
        whole = Part(self.add_node(), self.add_node())
        for part in parts:
            self.skip(whole.start, part.start)
            self.skip(part.end, whole.end)
        return whole

    def repeat(self, part: Part, least: int, most: int | None) -> Part:
        """Return a part that reads another part `least` to `most` times, None: any number."""
        count = least if most is None else most
        copies = [self._copy(part) for _ in range(count)]
        if most is None:
            whole = Part(self.add_node(), self.add_node())
            self.skip(whole.start, part.start)
            self.skip(part.end, whole.start)
            self.skip(whole.start, whole.end)
            return self.sequence([*copies, whole])
        end = self.add_node()
        for i in range(least, count):
            # A node of its own: a loop inside the part may lead back to its first node.
            entry = self.add_node()
            self.skip(entry, copies[i].start)
            self.skip(entry, end)
            copies[i] = Part(entry, copies[i].end)
        return self.sequence([*copies, Part(end, end)])

    def _copy(self, part: Part) -> Part:
        """Copy the nodes of a part, which calls rules and lies in none."""
        names = {part.start: self.add_node()}
        queue = [part.start]
        for node in queue:
            for edge in self.edges_N[node]:
                if edge.to not in names:
                    names[edge.to] = self.add_node()
                    queue.append(edge.to)
                self.edges_N[names[node]].append(edge._replace(to=names[edge.to]))
        if part.end not in names:
            names[part.end] = self.add_node()
        return Part(names[part.start], names[part.end])

    def leads_to_end(self, node: int) -> bool:
        """Return whether nothing but the end of its rule follows a node."""
        seen = set()
        while not self.is_end_N[node]:
            edges = self.edges_N[node]
            only = edges[0] if len(edges) == 1 else None
            if only is None or only.ranges or only.rule != NO_RULE or node in seen:
                return False
            seen.add(node)
            node = only.to
        return True

    def measure(self) -> None:
        """Compute the costs, from ends backwards (Knuth's algorithm)."""
        size = len(self.edges_N)
        self.cost_N, self.best_N = [FAR] * size, [None] * size
        before: list[list[tuple[int, Edge]]] = [[] for _ in range(size)]
        for node, edges in enumerate(self.edges_N):
            for edge in edges:
                before[edge.to].append((node, edge))
                if edge.rule != NO_RULE:
                    before[edge.rule].append((node, edge))
        heap: list[tuple[int, int, int]] = []
        found: list[tuple[int, Edge | None]] = []
        for node, is_end in enumerate(self.is_end_N):
            if is_end or node == FINAL:
                heap.append((0, len(found), node))
                found.append((node, None))
        while heap:
            cost, number, node = heapq.heappop(heap)
            if self.cost_N[node] < FAR:
                continue
            self.cost_N[node], self.best_N[node] = cost, found[number][1]
            for source, edge in before[node]:
                total = self._cost(edge)
                if total < self.cost_N[source]:
                    heapq.heappush(heap, (total, len(found), source))
                    found.append((source, edge))

    def _cost(self, edge: Edge) -> int:
        """Return the bytes to the end of the rule by an edge, as far as they are known."""
        cost = self.cost_N[edge.to]
        if edge.ranges:
            cost += utf8_length(cheapest(edge.ranges))
        elif edge.rule != NO_RULE:
            cost += self.cost_N[edge.rule]
        return cost
