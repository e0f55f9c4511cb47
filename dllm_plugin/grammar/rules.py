"""Read a grammar into a network of rules, from the EBNF that xgrammar writes of it.

xgrammar reads JSON schemas, EBNF and Lark, and prints all of them in one small syntax.
"""

import re
from collections.abc import Sequence

from dllm_plugin.grammar.expressions import Pattern, read_expression, read_pattern
from dllm_plugin.grammar.networks import FINAL, REPEATS, Network, Part, Unreadable
from dllm_plugin.grammar.patterns import Ranges, other_characters

ROOT = "root"
FIRST_PATTERN = 0xE000  # characters for private use, each for a pattern
MOST_PATTERNS = 0x1900
MAX_TEXT = 1_000_000  # characters of a grammar that are read
TOKEN = re.compile(
    r"""
    (?P<blank>[ \t]+)
    | (?P<line>\n)
    | (?P<define>(?P<defined>\w+)[ ]*::=)
    | (?P<expression>Regex\("(?P<pattern>(?:[^"\\]|\\.)*)"(?:,[ ]json_string=true)?\))
    | (?P<rule>\w+)(?!\()
    | "(?P<text>(?:[^"\\]|\\.)*)"
    | \[(?P<class>(?:[^\]\\]|\\.)*)\]
    | (?P<ahead>\(=)
    | \{(?P<least>\d+),[ ]*(?P<most>-?\d+)\}
    | (?P<sign>[()|*+?])
    """,
    re.VERBOSE | re.DOTALL,
)
CHARACTER = re.compile(
    r"\\x([0-9a-fA-F]{1,2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)",
    re.DOTALL,
)
CONTROLS = {"n": 10, "r": 13, "t": 9, "0": 0, "b": 8, "f": 12, "v": 11, "a": 7, "e": 27}


def read_rules(text: str, patterns: Sequence[Pattern] = ()) -> tuple[Network, int]:
    """Return the network of a grammar and its first node; the text ends at FINAL.

    Args:
        patterns: what characters from FIRST_PATTERN on stand for.

    Raises:
        Unreadable: the grammar is too large, or has syntax that is not read here.
    """
    if len(text) > MAX_TEXT:
        raise Unreadable(f"more than {MAX_TEXT} characters")
    reader = _Reader(text, patterns)
    while reader.token is not None:
        reader.rule()
    if ROOT not in reader.rules:
        raise Unreadable("no rule root")
    return _finished(reader.network, reader.network.call(reader.rules[ROOT]))


def read_regex(pattern: str) -> tuple[Network, int]:
    """Return the network of an expression that fits whole texts. Raises Unreadable."""
    network = Network()
    return _finished(network, read_expression(network, pattern))


def _finished(network: Network, whole: Part) -> tuple[Network, int]:
    network.skip(whole.end, FINAL)
    network.measure()
    return network, whole.start


class _Reader:
    """Parse a grammar by recursive descent; `token` is the next token, None at the end."""

    def __init__(self, text: str, patterns: Sequence[Pattern]) -> None:
        self.text, self.at, self.patterns = text, 0, patterns
        self.network = Network()
        self.rules: dict[str, Part] = {}
        self.token: re.Match[str] | None = None
        self._advance()

    def _advance(self) -> None:
        """Go on to the next token, over blanks and ends of lines."""
        self.token = None
        while self.at < len(self.text):
            found = TOKEN.match(self.text, self.at)
            if found is None:
                raise Unreadable(f"at {self.text[self.at : self.at + 40]!r}")
            self.at = found.end()
            if found.lastgroup not in ("blank", "line"):
                self.token = found
                return

    def _is(self, sign: str) -> bool:
        return self.token is not None and self.token["sign"] == sign

    def _expect(self, sign: str) -> None:
        if not self._is(sign):
            raise Unreadable(
                f"no {sign!r} before {self.text[self.at : self.at + 40]!r}"
            )
        self._advance()

    def _named(self, name: str) -> Part:
        if name not in self.rules:
            self.rules[name] = self.network.add_rule()
        return self.rules[name]

    def rule(self) -> None:
        """Read one rule."""
        if self.token is None or self.token["define"] is None:
            raise Unreadable(f"no rule before {self.text[self.at : self.at + 40]!r}")
        rule = self._named(self.token["defined"])
        self._advance()
        body = self._alternatives()
        self.network.skip(rule.start, body.start)
        self.network.skip(body.end, rule.end)
        if self.token is not None and self.token["ahead"]:
            # It only says sooner what the rules that follow say as well.
            self._advance()
            self._alternatives()
            self._expect(")")

    def _alternatives(self) -> Part:
        parts = [self._sequence()]
        while self._is("|"):
            self._advance()
            parts.append(self._sequence())
        return self.network.either(parts)

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while (part := self._element()) is not None:
            parts.append(self._repeated(part))
        return self.network.sequence(parts)

    def _element(self) -> Part | None:
        """Read what may be repeated; None if the sequence has ended."""
        token, network = self.token, self.network
        if token is None:
            return None
        if token["expression"]:
            pattern = "".join(map(chr, _characters(token["pattern"])))
            part = read_expression(network, pattern)
        elif token["rule"]:
            part = network.call(self._named(token["rule"]))
        elif token["text"] is not None:
            codes = _characters(token["text"])
            part = network.sequence([self._character(code) for code in codes])
        elif token["class"] is not None:
            part = network.characters(_class(token["class"]))
        elif token["sign"] == "(":
            self._advance()
            part = self._alternatives()
            if not self._is(")"):
                raise Unreadable("an unbalanced parenthesis")
        else:
            return None
        self._advance()
        return part

    def _character(self, code: int) -> Part:
        place = code - FIRST_PATTERN
        if 0 <= place < len(self.patterns):
            return read_pattern(self.network, self.patterns[place])
        return self.network.characters([(code, code)])

    def _repeated(self, part: Part) -> Part:
        while self.token is not None:
            if self.token["least"]:
                most = int(self.token["most"])
                bounds = int(self.token["least"]), None if most < 0 else most
            elif self.token["sign"] in REPEATS:
                bounds = REPEATS[self.token["sign"]]
            else:
                break
            part = self.network.repeat(part, *bounds)
            self._advance()
        return part


def _characters(spelled: str) -> list[int]:
    """Return the code points of a text with escapes."""
    codes = []
    for found in CHARACTER.finditer(spelled):
        number = found[1] or found[2] or found[3]
        if number:
            codes.append(int(number, 16))
        elif found[4]:
            codes.append(CONTROLS.get(found[4], ord(found[4])))
        else:
            codes.append(ord(found[5]))
    return codes


def _class(spelled: str) -> Ranges:
    """Return the characters of a class, without its brackets."""
    negated = spelled.startswith("^")
    found = list(CHARACTER.finditer(spelled, negated))
    codes = _characters(spelled[negated:])
    ranges: Ranges = []
    i = 0
    while i < len(codes):
        is_range = i + 2 < len(codes) and found[i + 1][0] == "-"
        last = i + 2 if is_range else i
        ranges.append((codes[i], codes[last]))
        i = last + 1
    return other_characters(ranges) if negated else ranges
