"""Find requests for structured output that are regular, and what their automaton is built of.

A JSON schema is regular if each of its keywords is listed below: every text of the expression that
outlines_core makes of such a schema is valid under it. White space is at most one blank.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from dllm_plugin.grammar.patterns import written_out

NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment"}
# What may stand beside `type`; `properties` and `items` have to.
BESIDE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
}
DEPTH = 16  # levels of a schema
LITERAL = r'"(?:[^"\\]|\\.)*"'
CHOICE = re.compile(rf"root ::= ({LITERAL}(?: \| {LITERAL})*)")
WHITESPACE = "[ ]?"


def expression(
    kind: str, spec: str, whitespace: bool = True
) -> dict[str, object] | None:
    """Return what :func:`dllm_plugin.grammar.automaton.build` takes; None if it is not regular.

    Args:
        kind: "json", "regex", "choice" or "grammar"; anything else is not regular.
        spec: as vLLM writes it. A choice may be written as a grammar of literals alone.
        whitespace: whether JSON may hold a blank between its tokens.
    """
    found = READERS[kind](spec) if kind in READERS else None
    return found and found | {"whitespace": WHITESPACE if whitespace else ""}


def is_choice(kind: str, spec: str) -> bool:
    """Return whether a grammar is a choice, also as vLLM writes it for xgrammar."""
    return kind == "choice" or (
        kind == "grammar" and CHOICE.fullmatch(spec) is not None
    )


def _regex(spec: str) -> dict[str, object]:
    return {"pattern": written_out(spec)}


def _choice(spec: str) -> dict[str, object] | None:
    try:
        words = json.loads(spec)
    except ValueError:
        return None
    return _words(words) if isinstance(words, list) else None


def _grammar(spec: str) -> dict[str, object] | None:
    if not is_choice("grammar", spec):
        return None
    try:
        return _words([json.loads(word) for word in re.findall(LITERAL, spec)])
    except ValueError:
        return None


def _words(words: list[str]) -> dict[str, object]:
    """Return an expression for some words, as code points: no character means anything else."""
    spelled = ("".join(rf"\x{{{ord(c):X}}}" for c in word) for word in words)
    return {"pattern": "|".join(f"(?:{word})" for word in spelled)}


def _json(spec: str) -> dict[str, object] | None:
    try:
        schema = json.loads(spec)
    except ValueError:
        return None
    return {"schema": spec} if _is_regular(schema, DEPTH) else None


def _is_regular(schema: Any, depth: int) -> bool:
    """Return whether the expression of a schema has only texts that are valid under it."""
    if not isinstance(schema, dict) or not depth:
        return False
    keywords = schema.keys() - NOTES
    if keywords == {"const"}:
        return _is_plain(schema["const"])
    if keywords == {"enum"}:
        values = schema["enum"]
        return isinstance(values, list) and bool(values) and all(map(_is_plain, values))
    if keywords == {"anyOf"}:
        return all(_is_regular(one, depth - 1) for one in schema["anyOf"])
    kind = schema.get("type")
    if not isinstance(kind, str) or kind not in BESIDE:
        return False
    if not keywords <= BESIDE[kind] | {"type"}:
        return False
    if kind == "array":
        return _is_regular(schema.get("items"), depth - 1)
    if kind != "object":
        return True
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not all(map(_is_plain, properties)):
        return False
    if not set(schema.get("required", ())) <= properties.keys():
        return False
    return all(_is_regular(one, depth - 1) for one in properties.values())


def _is_plain(value: Any) -> bool:
    """Return whether a value is written in only one way, without an escape."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) == f'"{value}"'
    return value is None or isinstance(value, bool | int)


READERS: dict[str, Callable[[str], dict[str, object] | None]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
