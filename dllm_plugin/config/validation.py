"""Check single values of options. Every error names the option, the limit and the value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dllm_plugin.decoding.families import POLICY_NAMES, STRATEGY_NAMES

Check = Callable[[str, Any], None]

ECHOED = 80  # characters of a value that errors and logs repeat; a request may send megabytes


def shown(value: Any) -> str:
    """Return a value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= ECHOED else text[: ECHOED - 3] + "..."


# What the command line knows before torch is imported; the table of methods may have more.
NAMES = {
    "strategy": ("auto", *STRATEGY_NAMES),
    "policy": ("auto", *POLICY_NAMES),
}


@dataclass(frozen=True)
class Choice:
    """Accept one of several words; `known` returns them, since torch code alone knows some."""

    known: Callable[[], tuple[str, ...]]

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is one of the words."""
        if isinstance(value, str) and value in NAMES.get(name, ()):
            return
        choices = self.known()
        if isinstance(value, str) and value in choices:
            return
        raise ValueError(
            f"{name} {shown(value)} is unknown; choose one of: {', '.join(choices)}."
        )


def strategy_choices() -> tuple[str, ...]:
    """Return the names of all strategies, and `auto`."""
    from dllm_plugin.decoding.methods import STRATEGIES

    return ("auto", *STRATEGIES)


def policy_choices() -> tuple[str, ...]:
    """Return the names of all policies, and `auto`."""
    from dllm_plugin.decoding.methods import POLICIES

    return ("auto", *POLICIES)


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


@dataclass(frozen=True)
class Flag:
    """Accept true or false, also as 1 and 0: what JSON becomes on its way through `vllm_xargs`."""

    optional: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is a truth value, or None where the engine may decide."""
        allowed = (None, False, True) if self.optional else (False, True)
        if type(value) not in (bool, int, float, type(None)) or value not in allowed:
            raise ValueError(f"{name} must be true or false, got {shown(value)}.")


@dataclass(frozen=True)
class Text:
    """Accept the name of a folder, or None."""

    def __call__(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is text or None."""
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be a folder name, got {shown(value)}.")
