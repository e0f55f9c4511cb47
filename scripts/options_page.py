#!/usr/bin/env python3
"""Write docs/options.md: the engine's options and the arguments of requests, from the code."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from dllm_plugin.config.options import OPTIONS, Option, Options
from dllm_plugin.config.request.arguments import ARGUMENTS, RequestArguments
from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.decoding.methods import METHODS, STRATEGIES

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
# Arguments that have a field of their own over HTTP.
HTTP = {
    "frames": '`"diffusion": {"frames": {"every": 2}}`',
    "early_text": '`"diffusion": {"early_text": true}`',
    "trace": '`"diffusion": {"trace": true}`',
}
HEAD = """# Options and request arguments

This page lists every option and every request argument, with limits and defaults.
`scripts/options_page.py` generates it; [decoding.md](decoding.md) explains what they do.

## Engine options

In Python `additional_config={"dllm": {"threshold": 0.8}}`, on the command line
`--additional-config '{"dllm": {"threshold": 0.8}}'`. A request may set those marked *.

"""
DEBUG = """
## Debug options

Tests and benchmarks set these options; elsewhere the defaults suit.

"""
REQUESTS = """
## Request arguments

In Python `SamplingParams(extra_args={"dllm_steps": 8})`, over HTTP
`"vllm_xargs": {"dllm_steps": 8}`, unless the table names another field. *Read by* lists strategies
and policies; an argument that is not read is refused, unless it does nothing at this value.
Arguments marked * are options too.

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
            known.doc,
        )
        (debug if known.debug else plain).append(row)
    columns = ("option", "values", "default", "meaning")
    text = HEAD + _table(columns, plain) + DEBUG + _table(columns, debug) + REQUESTS
    written = {f.name: f.default for f in fields(RequestArguments)} | written
    rows = []
    for name, known in ARGUMENTS.items():
        row = (
            f"`dllm_{name}`{' *' if name in OPTIONS else ''}",
            known.check.limits(),
            "the engine's" if name in OPTIONS else _default(known, written[name]),
            _readers(name, known),
            HTTP.get(name, "`vllm_xargs`"),
            known.doc,
        )
        rows.append(row)
    columns = ("argument", "values", "default", "read by", "HTTP", "meaning")
    return text + _table(columns, rows)


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
    if known.needs == "floats":
        return "`d2f`, `block_diffusion`, both with `adaptive`"
    strategies = []
    for strategy in STRATEGIES:
        families = [f for (s, f) in METHODS if s == strategy]
        reading = [f for f in families if _reads(name, known, strategy, f)]
        if reading == families:
            strategies.append(f"`{strategy}`")
        elif reading:
            titles = {f.name: f.title for f in FAMILIES.values()}
            named = ", ".join(titles[family] for family in reading)
            strategies.append(f"`{strategy}` ({named})")
    policies = _policies(name)
    words = ", ".join(strategies)
    if len(strategies) == len(STRATEGIES) and "(" not in words:
        words = "all"
    return f"{words}; policies {policies}" if policies else words


def _reads(name: str, known: Option, strategy: str, family: str) -> bool:
    method = METHODS[strategy, family]
    if name in OPTIONS:
        return name in method.options
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
