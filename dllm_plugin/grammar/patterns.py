"""Write regular expressions out, so that every compiler reads them as Python's re does.

As it is, xgrammar takes a line break for a dot, letters for unknown escapes, and anchors amid a
text for nothing; Rust, which guidance and automata are built on, has more word characters, and
operators such as ``&&`` in classes. Written out, classes are ranges of code points.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

import regex

# First and last code points, ascending and apart.
Ranges = list[tuple[int, int]]
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no characters
SURE = {  # what \w, \d and \s are to all compilers
    "w": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "d": [(48, 57)],
    "s": [(9, 13), (32, 32)],
}
CONTROLS = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
# Escapes that no automaton follows.
ASSERTIONS = "bB"
REFERENCES = "k123456789"
# Characters of classes: more keep compilers busy.
MOST_ADDED = 100_000
PROPERTIES = 256  # of Unicode that are remembered; requests name them
SHOWN = 80  # characters of an expression in a message
REPEATS = ("*", "+", "?", "{")
PLAIN = re.compile(r"[^\\\[.()|^$*+?{]+")
FLAGS = re.compile(r"\(\?[a-zA-Z-]+[:)]")
IGNORE_CASE = ("(?i)", "(?i:")
OPENS = re.compile(r"\((?:\?(?:P?<\w+>|:))?")
BESIDE = re.compile(r"\(\?<?[=!]")
QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(?:(,)(\d*))?\}")
PROPERTY = re.compile(r"\\[pP](?:\{(\^?)([\w ]+(?:[=:][\w ]+)?)\}|([LMNPSZC]))")
HALF = re.compile("[\ud800-\udfff]")
HEX = "[0-9a-fA-F]"
NUMBERS = {
    letter: re.compile(rf"({HEX}{{{digits}}})|\{{({HEX}{{1,8}})\}}")
    for letter, digits in (("x", 2), ("u", 4), ("U", 8))
}


class Token(NamedTuple):
    """Store a piece of an expression.

    kind    ``( ) | ^ $``, ``*`` for all that repeats, ``?`` for lazy repeats; else empty
    ranges  characters of a class or an escape
    least, most  how often what stands before it comes; None: any number
    """

    kind: str
    text: str
    ranges: tuple[tuple[int, int], ...] = ()
    least: int = 1
    most: int | None = 1


class LeftWhole(Exception):
    """Report an expression left to the compiler that knows it: flags, very long classes."""


def written_out(pattern: str) -> str:
    """Return an expression that fits what `pattern` fits in Python, or some of it; never more.

    ``\\w``, ``\\d`` and ``\\s`` are those of ASCII, and so is ``\\W``; what has flags stays as
    it is. Raises ValueError for what compilers would misread.
    """
    if HALF.search(pattern):
        raise ValueError("has half of a surrogate pair, which is no character")
    try:
        tokens = read_tokens(pattern)
    except LeftWhole:
        return pattern
    if any(token.text in IGNORE_CASE for token in tokens):
        return pattern
    _check_anchors(tokens, "^", "(", ")", "begins")
    _check_anchors(tokens[::-1], "$", ")", "(", "ends")
    return "".join(token.text for token in tokens if token.kind not in ("^", "$"))


def written_anywhere(pattern: str) -> str:
    """Return an expression of a JSON schema as all compilers read it, with its anchors."""
    try:
        return "".join(token.text for token in read_tokens(pattern))
    except (LeftWhole, ValueError):
        return pattern


def read_tokens(pattern: str, most: int = MOST_ADDED) -> list[Token]:
    """Split an expression into tokens. Raises ValueError or LeftWhole.

    Args:
        most: characters that classes may add when they are written out.
    """
    tokens: list[Token] = []
    at = length = 0
    before = ""
    while at < len(pattern):
        token, at = _token(pattern, at, before)
        tokens.append(token)
        before, length = token.kind, length + len(token.text)
        if length > len(pattern) + most:
            if "\\p" in pattern or "\\P" in pattern:
                raise LeftWhole
            raise ValueError(
                f"has classes that take more than {most} characters when they are written out"
            )
    return tokens


def _token(pattern: str, at: int, before: str) -> tuple[Token, int]:
    """Read the token after one of kind `before`; return it and where the next token starts."""
    if plain := PLAIN.match(pattern, at):
        return Token("", plain[0]), plain.end()
    sign = pattern[at]
    if sign == "[":
        return _class(pattern, at)
    if sign == ".":
        return _of_ranges([(0, 9), (11, LAST)]), at + 1
    if sign == "(":
        return _group(pattern, at)
    if sign in REPEATS:
        return _quantifier(pattern, at, before)
    if sign != "\\":
        return Token(sign, sign), at + 1
    letter = pattern[at + 1 : at + 2]
    if letter in ("A", "Z", "z"):
        return Token("^" if letter == "A" else "$", pattern[at : at + 2]), at + 2
    if letter and letter in ASSERTIONS:
        raise ValueError(f"has {sign + letter!r}, which looks at the text around it")
    if letter and letter in REFERENCES:
        raise ValueError(f"has {sign + letter!r}, which repeats the text of a group")
    (narrow, _), end = _escape(pattern, at)
    return _of_ranges(narrow), end


def _group(pattern: str, at: int) -> tuple[Token, int]:
    """Read what opens a group."""
    if found := BESIDE.match(pattern, at):
        raise ValueError(f"has {found[0]!r}, which looks at the text around it")
    if flags := FLAGS.match(pattern, at):
        if flags[0] not in IGNORE_CASE or (at and flags[0].endswith(")")):
            raise LeftWhole
        return Token("(" if flags[0].endswith(":") else "", flags[0]), flags.end()
    found = OPENS.match(pattern, at)
    assert found is not None
    if pattern.startswith("?", found.end()):
        shown = pattern[at : at + 3]
        raise ValueError(f"has {shown!r}, which compilers do not read alike")
    return Token("(", found[0]), found.end()


def _quantifier(pattern: str, at: int, before: str) -> tuple[Token, int]:
    """Read how often something comes, or a brace that says no such thing."""
    found = QUANTIFIER.match(pattern, at)
    if found is None or found[0] == "{}":
        return _of_ranges([(ord("{"), ord("{"))]), at + 1
    if before == "?" or (before == "*" and found[0] != "?"):
        raise ValueError(f"has {found[0][:SHOWN]!r} after another repeat")
    if before == "*":
        return Token("?", found[0]), found.end()
    text = found[0]
    least = int(text == "+")
    most = 1 if text == "?" else None
    if text.startswith("{"):
        least = int(found[1] or 0)
        most = int(found[3]) if found[3] else None
        most = most if found[2] else least
        text = f"{{{found[1] or 0},{found[3]}}}" if found[2] else text
    return Token("*", text, (), least, most), found.end()


def _class(pattern: str, at: int) -> tuple[Token, int]:
    """Read a class in brackets."""
    start, at = at, at + 1
    negated = pattern.startswith("^", at)
    at += negated
    narrow: Ranges = []
    wide: Ranges = []
    letters: set[str] = set()
    first = True
    while first or not pattern.startswith("]", at):
        first = False
        if pattern.startswith("\\", at):
            letters.add(pattern[at + 1 : at + 2])
        item = at
        (low, low_wide), at = _item(pattern, at, start)
        if pattern.startswith("-", at) and not pattern.startswith("-]", at):
            (high, _), at = _item(pattern, at + 1, start)
            (lowest, low_end), (highest, high_end) = low[0], high[0]
            if lowest != low_end or highest != high_end or lowest > highest:
                raise ValueError(
                    f"has {pattern[item:at]!r}, which is no range of characters"
                )
            low = low_wide = [(lowest, highest)]
        narrow.extend(low)
        wide.extend(low_wide)
    if any({letter, letter.upper()} <= letters for letter in SURE):
        # With its opposite, a shorthand leaves nothing out.
        narrow = wide = [(0, LAST)]
    token = _of_ranges(other_characters(wide) if negated else joined(narrow))
    if not token.ranges:
        shown = pattern[start : at + 1][:SHOWN]
        raise ValueError(f"has {shown!r}, which no character fits")
    return token, at + 1


def _item(pattern: str, at: int, start: int) -> tuple[tuple[Ranges, Ranges], int]:
    """Read one character or escape of a class; return its ranges, and where the next one starts."""
    if at >= len(pattern):
        raise ValueError(f"has a class at character {start + 1} that never ends")
    if pattern[at] == "\\":
        return _escape(pattern, at)
    only = [(ord(pattern[at]), ord(pattern[at]))]
    return (only, only), at + 1


def _escape(pattern: str, at: int) -> tuple[tuple[Ranges, Ranges], int]:
    """Read an escape; return what it may be, what it might be, and where the next token starts."""
    letter, end = pattern[at + 1 : at + 2], at + 2
    if letter in ("p", "P"):
        named = PROPERTY.match(pattern, at)
        if named is None:
            raise ValueError(f"has {pattern[at:end]!r} without a property's name")
        found = _property(named[2] or named[3])
        if (letter == "P") != bool(named[1]):
            found = other_characters(found)
        found = common_characters(found, other_characters([SURROGATES]))
        if not found:
            raise ValueError(f"has {named[0]!r}, which no character fits")
        return (found, found), named.end()
    if letter.lower() in SURE:
        return _shorthand(letter), end
    if letter in CONTROLS:
        code = CONTROLS[letter]
    elif letter in NUMBERS:
        number = NUMBERS[letter].match(pattern, end)
        code = int(number[1] or number[2], 16) if number else LAST + 1
        end = number.end() if number else end
        if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            raise ValueError(f"has {pattern[at:end]!r}, which is no character")
    elif letter == "0":
        digits = pattern[at + 1 : at + 4]
        digits = digits[: len(digits) - len(digits.lstrip("01234567"))]
        code, end = int(digits, 8), at + 1 + len(digits)
    elif letter and not (letter.isascii() and letter.isalnum()):
        code = ord(letter)
    else:
        raise ValueError(f"has {pattern[at:end]!r}, which compilers do not read alike")
    return ([(code, code)], [(code, code)]), end


def _check_anchors(
    tokens: list[Token], anchor: str, opening: str, closing: str, verb: str
) -> None:
    """Raise ValueError if an anchor stands amid a text. For ends, tokens come backwards."""
    free = True  # nothing precedes
    # What `free` was where each open group starts.
    outside: list[bool] = []
    anchored = 0  # how many groups are open around the last anchor
    for token, behind in pairwise([*tokens, Token("", "")]):
        if token.kind == opening:
            outside.append(free)
        elif token.kind == closing:
            # An end in such a group has met the repeat already, as what precedes it.
            if (
                anchor == "^"
                and anchored
                and anchored >= len(outside)
                and behind.kind == "*"
            ):
                raise ValueError("has '^' in a group that repeats, or may be left out")
            free, anchored = False, min(anchored, len(outside) - 1)
            if outside:
                outside.pop()
        elif token.kind == "|":
            free = outside[-1] if outside else True
        elif token.kind == anchor:
            if not free:
                raise ValueError(f"has {token.text!r} where no text {verb}")
            anchored = len(outside)
        elif token.kind not in ("^", "$"):
            free = False


@cache
def _shorthand(letter: str) -> tuple[Ranges, Ranges]:
    """Return what ``\\w``, ``\\d``, ``\\s`` and their opposites may be, and what they might be."""
    low = letter.lower()
    sure = SURE[low]
    # Hundreds of ranges in Python, so all that is not ASCII may be one or not.
    if low == "w":
        maybe = joined([*sure, (0x80, LAST)])
    else:
        maybe = [(m.start(), m.end() - 1) for m in re.finditer(rf"\{low}+", _unicode())]
    if letter == low:
        return sure, maybe
    return other_characters(maybe), other_characters(sure)


@lru_cache(maxsize=PROPERTIES)
def _property(name: str) -> Ranges:
    """Return the characters with a property of Unicode, such as ``Lu`` or ``Greek``."""
    try:
        found = regex.finditer(rf"\p{{{name}}}+", _unicode())
    except regex.error as error:
        raise ValueError(f"has {name!r}, which is no property of Unicode") from error
    return [(m.start(), m.end() - 1) for m in found]


@cache
def _unicode() -> str:
    """Return all code points."""
    return "".join(map(chr, range(LAST + 1)))


def _of_ranges(ranges: Ranges) -> Token:
    """Return the token of a class, without surrogates."""
    parts: Ranges = []
    for low, high in ranges:
        below = (low, min(high, SURROGATES[0] - 1))
        above = (max(low, SURROGATES[1] + 1), high)
        parts += [part for part in (below, above) if part[0] <= part[1]]
    return Token("", _spelled(parts), tuple(parts))


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of ranges."""
    union: Ranges = []
    for low, high in sorted(ranges):
        if union and low <= union[-1][1] + 1:
            union[-1] = (union[-1][0], max(union[-1][1], high))
        else:
            union.append((low, high))
    return union


def other_characters(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all code points that are not in ranges."""
    rest, low = [], 0
    for first, last in joined(ranges):
        if low < first:
            rest.append((low, first - 1))
        low = last + 1
    return [*rest, (low, LAST)] if low <= LAST else rest


def common_characters(
    some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]
) -> Ranges:
    """Return the code points that are in both of two ascending lists of ranges."""
    common: Ranges = []
    i = j = 0
    while i < len(some) and j < len(others):
        low, high = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if low <= high:
            common.append((low, high))
        if some[i][1] == high:
            i += 1
        else:
            j += 1
    return common


def _spelled(parts: Ranges) -> str:
    """Write ranges as a class; empty if there are none."""
    if len(parts) == 1 and parts[0][0] == parts[0][1]:
        return _code(parts[0][0])
    inside = ""
    for low, high in parts:
        inside += _code(low)
        if high > low:
            inside += f"-{_code(high)}"
    return f"[{inside}]" if inside else ""


def _code(code: int) -> str:
    """Write a code point as every compiler reads it."""
    sign = chr(code)
    return sign if sign.isascii() and sign.isalnum() else rf"\u{{{code:x}}}"
