"""Read a grammar into a network of rules, from the rules that xgrammar makes of it.

xgrammar reads JSON schemas, EBNF, Lark and regular expressions, and serialises all of them as one
list of integers. The rules of an expression are written out without calls, within strings of JSON
also with escapes, anchors and lengths.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dllm_plugin.grammar.networks import (
    FINAL,
    NO_RULE,
    Edge,
    Network,
    Part,
    Unreadable,
)
from dllm_plugin.grammar.patterns import (
    LAST,
    LeftWhole,
    Ranges,
    other_characters,
    read_tokens,
)

if TYPE_CHECKING:
    from xgrammar import Grammar

# Characters for private use, each for a pattern.
FIRST_PATTERN = 0xE000
MOST_PATTERNS = 0x1900
# How xgrammar 0.2.8 serialises grammars: kinds of parts; 7 are tags, which are not read.
FORMAT = "v16"
TEXT, CLASS, CLASS_STAR, EMPTY, CALL, SEQUENCE, CHOICES = range(7)
REPEAT, EXPRESSION = 8, 12
IGNORE_CASE = "(?i)"  # the only flag that is read
# Nodes of a pattern with the characters before them counted.
MAX_COUNTED = 20_000
NAMED = re.compile(r"\(\?P?<\w+>")
ANY_TEXT = r"[\u{0}-\u{10ffff}]*"
# Code points that no character has, for the begin and the end of the text of a pattern.
MARKS = {"^": "\U0010fffe", "$": "\U0010ffff"}
MARK_BEGIN, MARK_END = (((ord(mark), ord(mark)),) for mark in MARKS.values())
# Characters that strings of JSON escape by a letter.
ESCAPED = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
# Characters that JSON does not escape.
PLAIN: Ranges = [(32, 33), (35, 91), (93, LAST)]
BACKSLASH = ((92, 92),)


class Pattern(NamedTuple):
    """Store what a JSON schema asks of a string: `pattern`, `minLength` and `maxLength`."""

    text: str
    least: int = 0
    most: int | None = None


def read_rules(
    grammar: "Grammar", patterns: Sequence[Pattern] = ()
) -> tuple[Network, int]:
    """Return the network of a grammar and its first node; the text ends at FINAL.

    Args:
        patterns: what characters from FIRST_PATTERN on stand for.

    Raises:
        Unreadable: the grammar is too large, or has parts that are not read here.
    """
    reader = _Reader(grammar, patterns)
    return _finished(reader.network, reader.network.call(reader.root))


def read_regex(pattern: str) -> tuple[Network, int]:
    """Return the network of an expression that fits whole texts. Raises Unreadable."""
    network = Network()
    return _finished(network, read_expression(network, pattern))


def _finished(network: Network, whole: Part) -> tuple[Network, int]:
    network.skip(whole.end, FINAL)
    network.measure()
    return network, whole.start


class _Reader:
    """Read the rules of a grammar; `root` is that of the whole text."""

    def __init__(self, grammar: "Grammar", patterns: Sequence[Pattern]) -> None:
        read = json.loads(grammar.serialize_json())
        if read["__VERSION__"] != FORMAT:
            raise Unreadable(f"format {read['__VERSION__']} of xgrammar is not read")
        self.numbers: list[int] = read["grammar_expr_data"]
        self.starts: list[int] = read["grammar_expr_indptr"]
        self.patterns = patterns
        self.network = Network()
        self.rules: dict[int, Part] = {}
        for number, (_, body, *_) in enumerate(read["rules"]):
            rule = self._rule(number)
            part = self._part(body)
            self.network.skip(rule.start, part.start)
            self.network.skip(part.end, rule.end)
        self.root = self.rules[read["root_rule_id"]]

    def _rule(self, number: int) -> Part:
        if number not in self.rules:
            self.rules[number] = self.network.add_rule()
        return self.rules[number]

    def _part(self, number: int) -> Part:
        start, network = self.starts[number], self.network
        kind, size = self.numbers[start : start + 2]
        values = self.numbers[start + 2 : start + 2 + size]
        if kind == TEXT:
            text = bytes(values).decode()
            return network.sequence([self._character(ord(sign)) for sign in text])
        if kind in (CLASS, CLASS_STAR):
            negated, *ends = values
            ranges = list(zip(ends[::2], ends[1::2], strict=True))
            part = network.characters(other_characters(ranges) if negated else ranges)
            return part if kind == CLASS else network.repeat(part, 0, None)
        if kind == EMPTY:
            return network.empty()
        if kind == CALL:
            return network.call(self._rule(values[0]))
        if kind == SEQUENCE:
            return network.sequence([self._part(inner) for inner in values])
        if kind == CHOICES:
            return network.either([self._part(inner) for inner in values])
        if kind == REPEAT:
            rule, least, most = values
            part = network.call(self._rule(rule))
            return network.repeat(part, least, None if most < 0 else most)
        if kind == EXPRESSION:
            return read_expression(network, bytes(values[1:]).decode())
        raise Unreadable(f"a part of kind {kind}")

    def _character(self, code: int) -> Part:
        place = code - FIRST_PATTERN
        if 0 <= place < len(self.patterns):
            return read_pattern(self.network, self.patterns[place])
        return self.network.characters([(code, code)])


def _marked(pattern: str) -> str:
    """Return an expression as xgrammar reads it, with characters in place of anchors."""
    try:
        tokens = read_tokens(pattern.removeprefix(IGNORE_CASE))
    except (LeftWhole, ValueError) as error:
        raise Unreadable("an expression that is left to compilers") from error
    text = ""
    for token in tokens:
        is_named = token.kind == "(" and NAMED.match(token.text)
        text += "(" if is_named else MARKS.get(token.kind, token.text)
    return text


def read_expression(network: Network, pattern: str) -> Part:
    """Return the part that reads the texts of an expression. Raises Unreadable."""
    return _Expression(network, _marked(pattern), pattern, False).part(0, None)


def read_pattern(network: Network, pattern: Pattern) -> Part:
    """Return the part that reads the inside of strings of JSON which hold a pattern anywhere.

    Raises:
        Unreadable: the pattern has categories of Unicode, or looks around.
    """
    text = f"{ANY_TEXT}(?:{_marked(pattern.text)}){ANY_TEXT}"
    expression = _Expression(network, text, pattern.text, True)
    before = len(network.edges_N)
    part = expression.part(0, None)
    size = len(network.edges_N) - before
    least, most = pattern.least, pattern.most
    # Without its lengths a pattern is still worth a try: backends verify every closing.
    if (least or most is not None) and size * max(least, most or 0) <= MAX_COUNTED:
        part = expression.part(least, most)
    return part


class _State(NamedTuple):
    """Name a node with the nodes after its open calls, and what was read so far.

    length  characters, counted to a limit of at least 1
    """

    node: int
    after_calls: tuple[int, ...] = ()
    length: int = 0
    has_ended: bool = False


class _Expression:
    """Write the rules that xgrammar makes of an expression out, as parts without calls."""

    def __init__(
        self, network: Network, text: str, pattern: str, in_json: bool
    ) -> None:
        from xgrammar import Grammar  # slow: only if a request needs it

        self.network, self.in_json = network, in_json
        self.ignores_case = pattern.startswith(IGNORE_CASE)
        reader = _Reader(Grammar.from_regex(text), ())
        self.root, self.rules = reader.root, reader.network

    def part(self, least: int, most: int | None) -> Part:
        """Return the part without anchors, whose texts have `least` to `most` characters."""
        network = self.network
        names: dict[_State, int] = {}
        queue: list[_State] = []

        def to(state: _State) -> int:
            if state not in names:
                names[state] = network.add_node()
                queue.append(state)
            return names[state]

        start, end = to(_State(self.root.start)), network.add_node()
        for state in queue:
            has_ended = self.rules.is_end_N[state.node] and not state.after_calls
            if has_ended and state.length >= least:
                network.skip(names[state], end)
            for after, ranges in self._steps(state):
                if most is None or after.length <= most:
                    length = min(after.length, max(1, most or least))
                    self._connect(
                        names[state], to(after._replace(length=length)), ranges
                    )
        return Part(start, end)

    def _steps(self, state: _State) -> Iterator[tuple[_State, Ranges]]:
        """Yield the states after a state, and what is read on the way."""
        if self.rules.is_end_N[state.node] and state.after_calls:
            *calls, node = state.after_calls
            yield state._replace(node=node, after_calls=tuple(calls)), []
        for edge in self.rules.edges_N[state.node]:
            after = state._replace(node=edge.to)
            if edge.rule != NO_RULE:
                # A call that ends its rule returns to where that rule returns.
                calls = [] if self.rules.leads_to_end(edge.to) else [edge.to]
                after_calls = (*state.after_calls, *calls)
                yield state._replace(node=edge.rule, after_calls=after_calls), []
            elif edge.ranges == MARK_END:
                yield after._replace(has_ended=True), []
            elif edge.ranges == MARK_BEGIN:
                if not state.length:
                    yield after, []
            elif not edge.ranges:
                yield after, []
            elif not state.has_ended:
                ranges = list(edge.ranges)
                if self.ignores_case:
                    ranges = _both_cases(ranges)
                yield after._replace(length=state.length + 1), ranges

    def _connect(self, source: int, to: int, ranges: Ranges) -> None:
        """Add edges for a character, which strings of JSON may escape by a letter."""
        edges_N = self.network.edges_N
        if not self.in_json or not ranges:
            edges_N[source].append(Edge(to, tuple(ranges)))
            return
        plain: Ranges = []
        letters: Ranges = []
        for low, high in ranges:
            for first, last in PLAIN:
                if max(low, first) <= min(high, last):
                    plain.append((max(low, first), min(high, last)))
            for code, letter in ESCAPED.items():
                if low <= code <= high:
                    letters.append((ord(letter), ord(letter)))
        if plain:
            edges_N[source].append(Edge(to, tuple(plain)))
        if letters:
            escaped = self.network.add_node()
            edges_N[source].append(Edge(escaped, BACKSLASH))
            edges_N[escaped].append(Edge(to, tuple(letters)))


def _both_cases(ranges: Ranges) -> Ranges:
    """Add the other case of the letters of ASCII."""
    both = list(ranges)
    for low, high in ranges:
        for first, last, shift in ((65, 90, 32), (97, 122, -32)):
            if max(low, first) <= min(high, last):
                both.append((max(low, first) + shift, min(high, last) + shift))
    return both
