#!/usr/bin/env python3
"""Write docs/options.md: the engine's options and the arguments of requests, from the code."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from dllm_plugin.config.options import OPTIONS, Option, Options
from dllm_plugin.config.request.arguments import ARGUMENTS, RequestArguments
from dllm_plugin.config.validation import Choice, Flag, WholeNumber, WholeNumbers
from dllm_plugin.decoding.families import FAMILIES, STRATEGY_NAMES
from dllm_plugin.decoding.methods import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
# Arguments that have a field of their own over HTTP.
HTTP = {
    "frames": '`"diffusion": {"frames": {"every": 8}}`',
    "early_text": '`"diffusion": {"early_text": true}`',
    "trace": '`"diffusion": {"trace": true}`',
}
# Options that choose a way to decode, which no table of methods lists.
FLOATING = "`d2f`, `block_diffusion`"
READERS = {
    "adaptive": FLOATING,
    "min_window": FLOATING,
    "max_window": FLOATING,
    "commit_alone_from": "`block_diffusion`",
}
# Arguments that causal strategies refuse.
REFUSED = ("early_text", "grammar")
HEAD = """# Options and request arguments

For people who look an option up: every engine option and every request argument, with type,
limits, default and the strategies and policies that read it. [decoding.md](decoding.md) explains
them. `scripts/options_page.py` generates this page from the code.

A value that the chosen strategy, policy or family never reads is refused, unless it has no effect.
A request may set the options marked *.

## Engine options

The three spellings of an option:

- `diffuplug serve MODEL --threshold 0.8`;
- Python: `LLM(MODEL, additional_config={"dllm": {"threshold": 0.8}})`;
- `vllm serve MODEL --additional-config '{"dllm": {"threshold": 0.8}}'`.

"""
DEBUG = """
## Debug options

Tests and benchmarks set these options; elsewhere the defaults suit.

"""
REQUESTS = """
## Request arguments

Python: `SamplingParams(extra_args=...)` with the object of the third column. HTTP: the field of the
fourth column in the body of a chat or completion request. Values are examples.

What each strategy reads, beside arguments that all read; the table says for which families and
policies:

"""


def page() -> str:
    """Return the page."""
    written = {f.name: f.default for f in fields(Options)}
    plain, debug = [], []
    for name, known in OPTIONS.items():
        row = (
            f"`{name}`{' *' if known.request else ''}",
            known.check.limits(),
            _default(known, written[name]),
            _readers(name, known),
            known.doc,
        )
        (debug if known.debug else plain).append(row)
    columns = ("option", "type and limits", "default", "read by", "meaning")
    text = HEAD + _table(columns, plain) + DEBUG + _table(columns, debug) + REQUESTS
    written = {f.name: f.default for f in fields(RequestArguments)} | written
    rows = []
    for name, known in ARGUMENTS.items():
        spelled = f'{{"dllm_{name}": {_example(known)}}}'
        row = (
            f"`dllm_{name}`{' *' if name in OPTIONS else ''}",
            known.check.limits(),
            f"`{spelled}`",
            HTTP.get(name, f'`"vllm_xargs": {spelled}`'),
            "the engine's" if name in OPTIONS else _default(known, written[name]),
            _readers(name, known),
            known.doc,
        )
        rows.append(row)
    columns = ("argument", "type and limits", "Python", "HTTP", *columns[2:])
    return text + _by_strategy() + "\n" + _table(columns, rows)


def _by_strategy() -> str:
    """Return a line for each strategy with the arguments that it reads."""
    text = ""
    for strategy in STRATEGY_NAMES:
        read = []
        for name, known in ARGUMENTS.items():
            if f"`{strategy}`" in _readers(name, known):
                read.append(f"`dllm_{name}`")
        text += f"- `{strategy}`: {', '.join(read)}\n"
    return text


def _example(known: Option) -> str:
    """Return a value that the check accepts, as JSON."""
    check = known.check
    if isinstance(check, Flag):
        return "1"
    if isinstance(check, Choice):
        return f'"{check.known[-1]}"'
    if isinstance(check, WholeNumbers):
        return "[-1, -1, 13]" if check.low == -1 else "[16, 8]"
    if isinstance(check, WholeNumber):
        return str(min(8, check.high or 8))
    return "0.5"


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _default(known: Option, value: Any) -> str:
    if known.default:
        return known.default
    if value is None or value is MISSING:
        return "none"
    if value is False:
        return "off"
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


def _readers(name: str, known: Option) -> str:
    """Return the strategies and policies that read an argument, in words."""
    if name in READERS:
        return READERS[name]
    if known.needs == "floats":
        return "`d2f`, `block_diffusion`, both with `adaptive`"
    strategies = []
    for strategy in STRATEGY_NAMES:
        families = [f for (s, f) in METHODS if s == strategy]
        reading = [f for f in families if _reads(name, known, strategy, f)]
        if reading == families:
            strategies.append(f"`{strategy}`")
        elif reading:
            named = ", ".join(_titles(family) for family in reading)
            strategies.append(f"`{strategy}` ({named})")
    policies = _policies(name)
    words = ", ".join(strategies)
    if not words or len(strategies) == len(STRATEGY_NAMES) and "(" not in words:
        words = "all"
    return f"{words}; policies {policies}" if policies else words


def _titles(name: str) -> str:
    """Return the titles of all families that decode by the methods of a family."""
    found = dict.fromkeys(f.title for f in FAMILIES.values() if f.name == name)
    return ", ".join(found)


def _reads(name: str, known: Option, strategy: str, family: str) -> bool:
    method = METHODS[strategy, family]
    if name in OPTIONS:
        return name in method.options
    if method.causal and name in REFUSED:
        return False
    if method.inserts and name in ("early_text", "trace"):
        return False
    return not known.needs or bool(getattr(method, known.needs))


def _policies(name: str) -> str:
    """Return the policies that read an argument; empty if it does not depend on the policy."""
    found = set()
    for method in METHODS.values():
        if name in method.reads:
            return ""
        for policy, row in method.policies.items():
            if name in row.reads:
                found.add(f"`{policy}`")
    return ", ".join(sorted(found))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
