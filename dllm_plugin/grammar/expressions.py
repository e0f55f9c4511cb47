"""Read regular expressions into a network of rules, as texts or within strings of JSON."""

from typing import NamedTuple

from dllm_plugin.grammar.networks import REPEATS, Edge, Network, Part, Unreadable
from dllm_plugin.grammar.patterns import LAST, LeftWhole, Ranges, Token, read_tokens

IGNORE_CASE = "(?i)"  # the only flag that is read
MAX_COUNTED = 20_000  # nodes of a pattern with the characters before them counted
GROUPS = ("(", "(?:", "(?P<", "(?<")  # any other group looks around
# Code points that no character has: the begin and the end of the text of a pattern.
BEGIN, END = LAST + 1, LAST + 2
# Characters that strings of JSON escape by a letter.
ESCAPED = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
PLAIN: Ranges = [(32, 33), (35, 91), (93, LAST)]  # characters that JSON does not escape


class Pattern(NamedTuple):
    """Store what a JSON schema asks of a string: `pattern`, `minLength` and `maxLength`."""

    text: str
    least: int = 0
    most: int | None = None


def read_expression(network: Network, pattern: str) -> Part:
    """Return the part that reads the texts of an expression. Raises Unreadable."""
    reader = _Reader(network, pattern, in_json=False)
    return _limit(network, reader.whole(), 0, None)


def read_pattern(network: Network, pattern: Pattern) -> Part:
    """Return the part that reads the inside of strings of JSON which hold a pattern anywhere.

    Raises:
        Unreadable: the pattern has flags, categories of Unicode, or looks around.
    """
    before = len(network.edges_N)
    reader = _Reader(network, pattern.text, in_json=True)
    parts = [reader.any_text(), reader.whole(), reader.any_text()]
    size = len(network.edges_N) - before
    least, most = pattern.least, pattern.most
    # Without its lengths a pattern is still worth a try: backends verify every closing.
    if size * max(least, most or 0) > MAX_COUNTED:
        least, most = 0, None
    return _limit(network, network.sequence(parts), least, most)


class _Reader:
    """Parse tokens by recursive descent; `at` is the next one."""

    def __init__(self, network: Network, pattern: str, in_json: bool) -> None:
        self.network, self.in_json = network, in_json
        self.ignores_case = pattern.startswith(IGNORE_CASE)
        try:
            self.tokens = read_tokens(pattern.removeprefix(IGNORE_CASE))
        except (LeftWhole, ValueError) as error:
            raise Unreadable("an expression that is left to compilers") from error
        self.at = 0

    def whole(self) -> Part:
        """Read all tokens."""
        part = self.alternatives()
        if self.at < len(self.tokens):
            raise Unreadable("an unbalanced parenthesis")
        return part

    def _kind(self) -> str | None:
        return self.tokens[self.at].kind if self.at < len(self.tokens) else None

    def alternatives(self) -> Part:
        """Read parts between bars."""
        parts = [self._sequence()]
        while self._kind() == "|":
            self.at += 1
            parts.append(self._sequence())
        return self.network.either(parts)

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self._kind() not in (None, "|", ")"):
            parts += self._repeated()
        return self.network.sequence(parts)

    def _repeated(self) -> list[Part]:
        """Read a token and how often it comes, which concerns the last character of plain text."""
        token = self.tokens[self.at]
        self.at += 1
        parts = self._parts(token)
        while self._kind() in ("*", "?"):
            text = self.tokens[self.at].text
            if self._kind() == "*":
                least, most = _bounds(text)
                parts[-1] = self.network.repeat(parts[-1], least, most)
            self.at += 1
        return parts

    def _parts(self, token: Token) -> list[Part]:
        if token.kind == "(":
            if not (token.text in GROUPS or token.text.startswith(GROUPS[2:])):
                raise Unreadable(f"{token.text} looks around")
            inside = self.alternatives()
            if self._kind() != ")":
                raise Unreadable("an unbalanced parenthesis")
            self.at += 1
            return [inside]
        if token.kind == "^":
            return [self.network.characters([(BEGIN, BEGIN)])]
        if token.kind == "$":
            return [self.network.characters([(END, END)])]
        if token.ranges:
            return [self._character(list(token.ranges))]
        if token.kind or token.text.startswith("\\"):
            raise Unreadable(f"{token.text} has no characters")
        return [self._character([(ord(sign), ord(sign))]) for sign in token.text]

    def any_text(self) -> Part:
        """Return the part that reads any text."""
        return self.network.repeat(self._character([(0, LAST)]), 0, None)

    def _character(self, ranges: Ranges) -> Part:
        if self.ignores_case:
            ranges = _both_cases(ranges)
        if not self.in_json:
            return self.network.characters(ranges)
        plain = [
            (max(low, first), min(high, last))
            for low, high in ranges
            for first, last in PLAIN
            if max(low, first) <= min(high, last)
        ]
        letters: Ranges = []
        for code, letter in ESCAPED.items():
            if any(low <= code <= high for low, high in ranges):
                letters.append((ord(letter), ord(letter)))
        part = self.network.characters(plain)
        if letters:
            backslash = self.network.characters([(92, 92)])
            letter_part = self.network.characters(letters)
            escape = self.network.sequence([backslash, letter_part])
            part = self.network.either([part, escape])
        return part


def _both_cases(ranges: Ranges) -> Ranges:
    """Add the other case of the letters of ASCII."""
    both = list(ranges)
    for low, high in ranges:
        for first, last, shift in ((65, 90, 32), (97, 122, -32)):
            if max(low, first) <= min(high, last):
                both.append((max(low, first) + shift, min(high, last) + shift))
    return both


def _bounds(quantifier: str) -> tuple[int, int | None]:
    if quantifier in REPEATS:
        return REPEATS[quantifier]
    least, comma, most = quantifier[1:-1].partition(",")
    if not comma:
        return int(least), int(least)
    return int(least or 0), int(most) if most else None


_MARK_BEGIN = ((BEGIN, BEGIN),)
_MARK_END = ((END, END),)
_BACKSLASH = ((92, 92),)  # of an escape: the letter after it counts


class _State(NamedTuple):
    """Name a node with the characters read so far, counted to a limit, and whether END was met."""

    node: int
    length: int
    is_fresh: bool
    has_ended: bool


def _limit(network: Network, part: Part, least: int, most: int | None) -> Part:
    """Return a part without anchors, whose texts have `least` to `most` characters."""
    limit = least if most is None else most
    first = _State(part.start, 0, True, False)
    names = {first: network.add_node()}
    queue = [first]
    end = network.add_node()
    for state in queue:
        if state.node == part.end and state.length >= least:
            network.skip(names[state], end)
        for edge in network.edges_N[state.node]:
            after = _after(state, edge)
            if after is None or (most is not None and after.length > most):
                continue
            after = after._replace(length=min(after.length, limit))
            if after not in names:
                names[after] = network.add_node()
                queue.append(after)
            ranges = () if edge.ranges in (_MARK_BEGIN, _MARK_END) else edge.ranges
            network.edges_N[names[state]].append(Edge(names[after], ranges))
    return Part(names[first], end)


def _after(state: _State, edge: Edge) -> _State | None:
    """Return the state after an edge; None if an anchor forbids it."""
    if edge.ranges == _MARK_BEGIN:
        return state._replace(node=edge.to) if state.is_fresh else None
    if edge.ranges == _MARK_END:
        return state._replace(node=edge.to, has_ended=True)
    if not edge.ranges:
        return state._replace(node=edge.to)
    if state.has_ended:
        return None
    length = state.length + (edge.ranges != _BACKSLASH)
    return _State(edge.to, length, False, False)
