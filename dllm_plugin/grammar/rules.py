"""Read a grammar into a network of rules, from the rules that xgrammar makes of it.

xgrammar reads JSON schemas, EBNF, Lark and regular expressions, and serialises all of them as one
list of integers. Expressions are read here, within strings of JSON with escapes, anchors and
lengths.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .networks import FINAL, Edge, Network, Part, Unreadable
from .patterns import (
    IGNORE_CASE,
    LAST,
    LeftWhole,
    Ranges,
    Token,
    common_characters,
    joined,
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
# Nodes of a pattern with the characters before them counted.
MAX_COUNTED = 20_000
MOST_CHARACTERS = 2_000_000  # of all classes of an expression, as they are written out
# Ranges without characters, for the begin and the end of the text of a pattern.
MARKS: dict[str, Ranges] = {"^": [(-2, -2)], "$": [(-1, -1)]}
MARKED = tuple(tuple(ranges) for ranges in MARKS.values())
# Characters that strings of JSON escape by a letter.
ESCAPED = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
# Characters that JSON does not escape; guidance refuses 127.
PLAIN: Ranges = [(32, 33), (35, 91), (93, 126), (128, LAST)]
BACKSLASH = ((92, 92),)


class Pattern(NamedTuple):
    """Store what a JSON schema asks of a string: patterns, `minLength` and `maxLength`."""

    texts: tuple[str, ...]
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


def read_expression(network: Network, pattern: str) -> Part:
    """Return the part that reads the texts of an expression. Raises Unreadable."""
    return _Product(network, [_parse(pattern)], False).part(0, None)


def read_pattern(network: Network, pattern: Pattern) -> Part:
    """Return the part that reads the inside of strings of JSON which hold each text anywhere.

    Raises:
        Unreadable: an expression looks around, or has flags that are not read here.
    """
    product = _Product(network, [_parse(text, True) for text in pattern.texts], True)
    before = len(network.edges_N)
    part = product.part(0, None)
    size = len(network.edges_N) - before
    least, most = pattern.least, pattern.most
    # Without its lengths a pattern is still worth a try: backends verify every closing.
    if (least or most is not None) and size * max(least, most or 0) <= MAX_COUNTED:
        part = product.part(least, most)
    return part


class _Whole(NamedTuple):
    """Store an expression in a network of its own, in which no rule is called."""

    network: Network
    start: int
    end: int


def _parse(pattern: str, anywhere: bool = False) -> _Whole:
    """Return the network of an expression; `anywhere`: with any text around it."""
    try:
        tokens = read_tokens(pattern, MOST_CHARACTERS)
    except (LeftWhole, ValueError) as error:
        raise Unreadable("an expression that is left to compilers") from error
    network = Network()
    parser = _Parser(network, tokens)
    part = parser.choice()
    if parser.at < len(tokens):
        raise Unreadable("a group that is closed, and not open")
    if anywhere:
        before, after = _any_text(network), _any_text(network)
        part = network.sequence([before, part, after])
    end = network.add_node()
    network.skip(part.end, end)
    return _Whole(network, part.start, end)


def _any_text(network: Network) -> Part:
    return network.repeat(network.characters([(0, LAST)]), 0, None)


class _Parser:
    """Parse the tokens of an expression into the parts of a network."""

    def __init__(self, network: Network, tokens: list[Token]) -> None:
        self.network = network
        self.tokens = tokens
        self.at = 0
        self.ignores_case = False

    def choice(self) -> Part:
        """Return the part that reads one of some alternatives."""
        parts = [self._sequence()]
        while self._kind() == "|":
            self.at += 1
            parts.append(self._sequence())
        return self.network.either(parts)

    def _kind(self) -> str:
        """Return the kind of the next token; that of a closing parenthesis after the last."""
        return self.tokens[self.at].kind if self.at < len(self.tokens) else ")"

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self._kind() not in ("|", ")"):
            token = self.tokens[self.at]
            self.at += 1
            if token.kind == "*":
                if not parts or (token.most is not None and token.least > token.most):
                    raise Unreadable("a repeat of nothing, or of no number")
                part = self.network.repeat(parts.pop(), token.least, token.most)
                parts.append(part)
            elif token.kind == "(":
                parts.append(self._group(token))
            elif token.kind in MARKS:
                parts.append(self.network.characters(MARKS[token.kind]))
            elif token.kind != "?":
                parts += self._characters(token)
        return self.network.sequence(parts)

    def _group(self, token: Token) -> Part:
        ignored_case = self.ignores_case
        self.ignores_case |= token.text in IGNORE_CASE
        part = self.choice()
        if self.at == len(self.tokens):
            raise Unreadable("a group that is never closed")
        self.at += 1
        self.ignores_case = ignored_case
        return part

    def _characters(self, token: Token) -> list[Part]:
        if token.text in IGNORE_CASE:
            self.ignores_case = True
            return []
        classes = [list(token.ranges)]
        if not token.ranges:
            classes = [[(ord(sign), ord(sign))] for sign in token.text]
        if self.ignores_case:
            classes = [_both_cases(ranges) for ranges in classes]
        return [self.network.characters(ranges) for ranges in classes]


class _State(NamedTuple):
    """Name a node of each expression, and what was read so far.

    length  characters, counted to a limit of at least 1
    ended   nothing may follow, for an expression has met its end of the text
    """

    nodes: tuple[int, ...]
    length: int = 0
    ended: bool = False


class _Product:
    """Write expressions that fit the same text as one part of a network."""

    def __init__(self, network: Network, wholes: list[_Whole], in_json: bool) -> None:
        self.network, self.wholes, self.in_json = network, wholes, in_json

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

        ends = tuple(whole.end for whole in self.wholes)
        start = to(_State(tuple(whole.start for whole in self.wholes)))
        end = network.add_node()
        for state in queue:
            if state.nodes == ends and state.length >= least:
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
        reading: list[tuple[tuple[int, ...], Ranges]] = [((), [(0, LAST)])]
        for i, (whole, node) in enumerate(zip(self.wholes, state.nodes, strict=True)):
            both: list[tuple[tuple[int, ...], Ranges]] = []
            for edge in whole.network.edges_N[node]:
                if not edge.ranges or edge.ranges in MARKED:
                    # A node whose edges read nothing moves on by itself.
                    reading = []
                    nodes = (*state.nodes[:i], edge.to, *state.nodes[i + 1 :])
                    ended = state.ended or edge.ranges == MARKED[1]
                    if edge.ranges != MARKED[0] or not state.length:
                        yield state._replace(nodes=nodes, ended=ended), []
                    continue
                for others, ranges in reading:
                    if common := common_characters(ranges, edge.ranges):
                        both.append(((*others, edge.to), common))
            if not reading:
                return
            reading = both
        if not state.ended:
            for nodes, ranges in reading:
                yield _State(nodes, state.length + 1), ranges

    def _connect(self, source: int, to: int, ranges: Ranges) -> None:
        """Add edges for a character, which strings of JSON may escape by a letter."""
        edges_N = self.network.edges_N
        if not self.in_json or not ranges:
            edges_N[source].append(Edge(to, tuple(ranges)))
            return
        plain = common_characters(ranges, PLAIN)
        letters: Ranges = []
        for code, letter in ESCAPED.items():
            if common_characters(ranges, [(code, code)]):
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
    for letters, shift in (((65, 90), 32), ((97, 122), -32)):
        for low, high in common_characters(ranges, [letters]):
            both.append((low + shift, high + shift))
    return joined(both)
