"""Check single values. Every error names the option, the limit and the value.

Every check also writes its limits in words, for the tables of docs/options.md.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

# Characters of a value that errors and logs repeat; a request may send megabytes.
ECHOED = 80
# A string that never ends is one match, or each of its quotes would be tried.
STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
BRACKETS = re.compile(rb"[\[\]{}]")
DEEPEST = 200  # of lists and objects, far below what Python reads


def shown(value: Any) -> str:
    """Return the repr of a value, cut to `ECHOED` characters."""
    text = repr(value)
    return text if len(text) <= ECHOED else text[: ECHOED - 3] + "..."


def did_you_mean(
    word: Any, known: Iterable[str], prefix: str = "", cutoff: float = 0.6
) -> str:
    """Return a question that names the known word nearest to `word`; empty if none is near.

    `cutoff` is the least similarity, from 0 to 1; `prefix` goes before the known word.
    """
    near = get_close_matches(str(word)[:ECHOED], list(known), 1, cutoff)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


def check_depth(body: bytes) -> None:
    """Raise ValueError for lists and objects of JSON that stand too deep in each other."""
    if body.count(b"[") + body.count(b"{") <= DEEPEST:
        return
    depth = 0
    for bracket in BRACKETS.findall(STRINGS.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise ValueError(
                f"The body holds lists and objects more than {DEEPEST} deep in each other: "
                "write it flatter."
            )


class Check(Protocol):
    """Check the value of an option."""

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless the value is in range."""

    def limits(self) -> str:
        """Return type and range in words."""


@dataclass(frozen=True)
class Choice:
    """Accept one of several words."""

    known: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is one of the words."""
        if isinstance(value, str) and value in self.known:
            return
        raise ValueError(
            f"{name} {shown(value)} is unknown; choose one of: "
            f"{', '.join(self.known)}{did_you_mean(value, self.known)}."
        )

    def limits(self) -> str:
        """Return the words."""
        return ", ".join(f"`{word}`" for word in self.known)


@dataclass(frozen=True)
class Number:
    """Accept a number in [low, high]; `above`: greater than low; `optional`: None is allowed."""

    low: float
    high: float
    optional: bool = False
    above: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is such a number."""
        if value is None and self.optional:
            return
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:
            raise ValueError(
                f"{name} must be a number between {self.low} and {self.high}, got {shown(value)}."
            )
        if self.above and value == self.low:
            raise ValueError(
                f"{name} must be greater than {self.low:g}, got {self.low:g}."
            )

    def limits(self) -> str:
        """Return the range."""
        first = "above" if self.above else "from"
        return f"number {first} {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class WholeNumber:
    """Accept a whole number of at least `low`, at most `high`; `open`: None is filled in later."""

    low: int
    high: int | None = None
    open: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is such a number."""
        if value is None and self.open:
            return
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if self.high is not None and not self.open:
            if not is_whole or not self.low <= value <= self.high:
                raise ValueError(
                    f"{name} must be a whole number between {self.low} and {self.high}, "
                    f"got {shown(value)}."
                )
            return
        if not is_whole or value < self.low:
            raise ValueError(
                f"{name} must be a whole number of at least {self.low}, got {shown(value)}."
            )
        if self.high is not None and value > self.high:
            raise ValueError(f"{name} must be at most {self.high}, got {shown(value)}.")

    def limits(self) -> str:
        """Return the range."""
        if self.high is None or self.high >= 2**31 - 1:
            return f"whole number from {self.low}"
        return f"whole number from {self.low} to {self.high}"


@dataclass(frozen=True)
class Flag:
    """Accept true or false, also as 1 and 0: what JSON becomes on its way through `vllm_xargs`."""

    optional: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is a truth value, or None if that is allowed."""
        allowed = (None, False, True) if self.optional else (False, True)
        if type(value) not in (bool, int, float, type(None)) or value not in allowed:
            raise ValueError(f"{name} must be true or false, got {shown(value)}.")

    def limits(self) -> str:
        """Return the two values."""
        return "true, false"


@dataclass(frozen=True)
class Text:
    """Accept the name of a folder, or None."""

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is text or None."""
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be a folder name, got {shown(value)}.")

    def limits(self) -> str:
        """Return what the text names."""
        return "folder"


@dataclass(frozen=True)
class WholeNumbers:
    """Accept a list of at most `most` whole numbers of at least `low`; None: no such limit."""

    items: str
    low: int | None = None
    most: int | None = None

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is such a list."""
        fits = isinstance(value, list)
        if self.most is not None:
            fits = fits and 1 <= len(value) <= self.most
        if not fits:
            raise ValueError(f"{name} must be {self.limits()}, got {shown(value)}.")
        if self.low is None:
            return
        for place, item in enumerate(value):
            if type(item) is not int or item < self.low:
                raise ValueError(
                    f"{name} must hold {self.items}, got {shown(item)} at place {place}."
                )

    def limits(self) -> str:
        """Return what the list holds."""
        count = "" if self.most is None else f"1 to {self.most} "
        return f"a list of {count}{self.items}"
