"""Find which schemas xgrammar does not read as a whole, and which grammars are regular.

Keywords that xgrammar 0.2.8 does not honour were found by random texts, judged by jsonschema, also
for the schemas of its test suite. What vLLM hands to another backend by itself is not looked for.

A JSON schema is regular if each of its keywords is listed in BESIDE: every text of the expression
that outlines_core makes of such a schema is valid under it. White space is at most one blank.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from .patterns import written_out

IGNORED = (
    "if",
    "not",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
BRANCHES = ("$ref", "anyOf", "oneOf", "allOf")
VALUES = ("enum", "const")
# In such strings xgrammar accepts what JSON must escape, and it ignores look-arounds of a pattern.
STRINGS = ("minLength", "maxLength", "pattern")
# Raw control characters as well.
POINTERS = ("json-pointer", "relative-json-pointer")
# A 31st of November and 01.02.03.04 are accepted. For JSON schema a format is only a note.
ROUGH = ("date", "date-time", "ipv4", "ipv6")
# Counts for nothing unless a type is named.
TYPED = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minProperties", "maxProperties", "patternProperties", "propertyNames"),
    *("unevaluatedProperties", "uniqueItems", "contains", "minContains", "maxContains"),
    *("minItems", "maxItems"),
)
# Keywords that assert something of a value, besides `type`.
ASSERTING = (
    *(*BRANCHES, *VALUES, *STRINGS, *TYPED),
    *("properties", "required", "additionalProperties", "items", "prefixItems"),
)
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    "items",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "contains",
)
TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}


def loose_keyword(schema: Any) -> str:
    """Name what xgrammar does not read of a schema; empty if it reads all."""
    for one in _every(schema):
        found = _first(IGNORED, one) or _beside(one) or _type_beside(one, schema)
        found = found or _of_strings(one) or _overlapping(one, schema)
        if found:
            return found
    return ""


def most_values(schema: Any) -> int:
    """Return how many values, or alternatives, the longest list of a schema has."""
    most = 0
    for one in _every(schema):
        for name in ("enum", *LISTS):
            if isinstance(one.get(name), list):
                most = max(most, len(one[name]))
    return most


def least_names(schema: Any) -> int:
    """Return a `minProperties` that equal names would reach; 0 if a schema has none.

    Backends keep apart the names of `properties`, and not those that a text chooses.
    """
    for one in _every(schema):
        least, required = one.get("minProperties"), one.get("required")
        is_closed = False in (
            one.get("additionalProperties"),
            one.get("unevaluatedProperties"),
        )
        if is_closed and not one.get("patternProperties"):
            continue
        named = len(set(map(str, required))) if isinstance(required, list) else 0
        is_object = "object" in (_kinds(one) or TYPES.values())
        if isinstance(least, (int, float)) and least > named + 1 and is_object:
            return int(least)
    return 0


def patterns_of(schema: Any) -> Iterator[str]:
    """Yield the regular expressions of a schema."""
    for one in _every(schema):
        if isinstance(text := one.get("pattern"), str):
            yield text
        named = one.get("patternProperties")
        yield from named if isinstance(named, dict) else ()


def has_rough_format(schema: Any) -> bool:
    """Return whether xgrammar reads a format of a schema less strictly than guidance."""
    for one in _every(schema):
        is_ignored = "format" in one and "type" not in one
        if is_ignored or one.get("format") in ROUGH:
            return True
    return False


def _every(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema, and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in MAPS:
        inner = schema.get(name)
        for one in inner.values() if isinstance(inner, dict) else ():
            yield from _every(one)
    for name in LISTS:
        inner = schema.get(name)
        for one in inner if isinstance(inner, list) else ():
            yield from _every(one)
    for name in SINGLE:
        yield from _every(schema.get(name))


def _first(names: Sequence[str], schema: dict[str, Any]) -> str:
    """Return the first of some keywords that a schema has; empty if it has none."""
    for name in names:
        if name in schema:
            return name
    return ""


def _listed(schema: dict[str, Any]) -> Any:
    """Return the values of `const` or `enum`; None without them."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _of_strings(schema: dict[str, Any]) -> str:
    """Name the keyword of strings that xgrammar reads otherwise than JSON schema."""
    if "type" in schema and "string" not in _kinds(schema):
        return ""
    if schema.get("format") in POINTERS:
        return "format"
    return _first(STRINGS, schema)


def _type_beside(schema: dict[str, Any], root: Any) -> str:
    """Name alternatives of other types than `type`, which xgrammar then ignores."""
    if "type" not in schema:
        return ""
    for name in BRANCHES:
        branches = [schema] if name == "$ref" else schema.get(name)
        if name not in schema or not isinstance(branches, list):
            continue
        found = [resolved(one, root) for one in branches]
        if not all(_is_within(one, _kinds(schema)) for one in found):
            return f"type beside {name}"
    return ""


def _is_within(schema: Any, kinds: list[str]) -> bool:
    """Return whether a schema names only values of some types."""
    if not isinstance(schema, dict):
        return False
    if "type" in schema:
        return set(_kinds(schema)) <= set(_with_integer(kinds))
    return _are_of(_listed(schema), kinds)


def _overlapping(schema: dict[str, Any], root: Any) -> str:
    """Name a oneOf whose alternatives may overlap: xgrammar reads it as anyOf."""
    either = schema.get("oneOf")
    if not isinstance(either, list):
        return ""
    found = [resolved(one, root) for one in either]
    apart = all(_are_apart(one, other, root) for one, other in combinations(found, 2))
    return "" if apart else "oneOf with alternatives that may overlap"


def _are_apart(one: Any, other: Any, root: Any) -> bool:
    """Return whether no value fits two schemas, by their values or by a required property.

    Properties are compared only by the values they name, so references may go in circles.
    """
    if _name_others(one, other):
        return True
    mine, theirs = _needed(one), _needed(other)
    return any(
        _name_others(resolved(mine[name], root), resolved(theirs[name], root))
        for name in mine.keys() & theirs.keys()
    )


def _name_others(one: Any, other: Any) -> bool:
    """Return whether two schemas list different values, or name different types."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    values, others = _values(one), _values(other)
    if values and others:
        return not values & others
    kind, another = one.get("type"), other.get("type")
    if not (isinstance(kind, str) and isinstance(another, str)):
        return False
    return kind != another and {kind, another} != {"integer", "number"}


def _needed(schema: Any) -> dict[str, Any]:
    """Return the properties that an object has to have, as far as they are described."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return {}
    described, needed = schema.get("properties"), schema.get("required")
    if not (isinstance(described, dict) and isinstance(needed, list)):
        return {}
    return {name: inner for name, inner in described.items() if name in needed}


def _values(schema: dict[str, Any]) -> set[tuple[bool, Any]]:
    """Return the values that a schema lists, and whether each is a bool; empty: none, or others.

    1 and 1.0 are one value in JSON, as in Python, but 1 and true are not.
    """
    listed = _listed(schema)
    if not isinstance(listed, list) or any(
        isinstance(value, dict | list) for value in listed
    ):
        return set()
    return {(isinstance(value, bool), value) for value in listed}


def resolved(schema: Any, root: Any) -> Any:
    """Follow a reference within the schema once."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    for name in reference.removeprefix("#/").split("/"):
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _beside(schema: dict[str, Any]) -> str:
    """Name the keyword that xgrammar ignores because of others in the same schema."""
    asserting = [name for name in ASSERTING if name in schema]
    for name in (*BRANCHES, *VALUES):
        others = [other for other in asserting if other != name]
        if name in asserting and others:
            return f"{others[0]} beside {name}"
    reference = schema.get("$ref", "#")
    if isinstance(reference, str) and not (
        reference == "#" or reference.startswith("#/")
    ):
        return "a $ref that is no path in the schema"
    if "type" not in schema:
        bound = _first(TYPED, schema)
        return f"{bound} without type" if bound else _unknown(schema)
    values = _listed(schema)
    if isinstance(values, list) and not _are_of(values, _kinds(schema)):
        return "type beside values of another one"
    return _unknown(schema)


def _unknown(schema: dict[str, Any]) -> str:
    """Name `required` if it lists a property that the schema does not describe."""
    required, described = schema.get("required"), schema.get("properties", {})
    if not (isinstance(required, list) and isinstance(described, dict)):
        return ""
    if set(map(str, required)) - set(described):
        return "required of what properties lacks"
    return ""


def _kinds(schema: dict[str, Any]) -> list[str]:
    """Return the types that a schema names."""
    kinds = schema.get("type", [])
    named = kinds if isinstance(kinds, list) else [kinds]
    return [kind for kind in named if isinstance(kind, str)]


def _with_integer(kinds: list[str]) -> list[str]:
    """Return types, with integers if there are numbers."""
    return [*kinds, "integer"] if "number" in kinds else kinds


def _are_of(values: Any, kinds: list[str]) -> bool:
    """Return whether values are a list, all of one of some types."""
    known = _with_integer(kinds)
    return isinstance(values, list) and all(TYPES.get(type(v)) in known for v in values)


NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment"}
# Keywords that may accompany `type`; `properties` and `items` must.
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
        spec: as vLLM writes it. A choice may be written as a grammar of literals only.
        whitespace: whether JSON may hold a blank between its tokens.
    """
    blanks: dict[str, object] = {"whitespace": WHITESPACE if whitespace else ""}
    if kind == "regex":
        return blanks | {"pattern": written_out(spec)}
    try:
        if kind == "json" and _is_regular(json.loads(spec), DEPTH):
            return blanks | {"schema": spec}
        words = _words(kind, spec)
    except json.JSONDecodeError:
        return None
    if words is None:
        return None
    # As code points: no character means anything else.
    spelled = ["".join(rf"\x{{{ord(c):X}}}" for c in word) for word in words]
    return blanks | {"pattern": "|".join(f"(?:{word})" for word in spelled)}


def is_choice(kind: str, spec: str) -> bool:
    """Return whether a grammar is a choice, also as vLLM writes it for xgrammar."""
    return kind == "choice" or (
        kind == "grammar" and CHOICE.fullmatch(spec) is not None
    )


def _words(kind: str, spec: str) -> list[str] | None:
    """Return the words of a choice; None for any other grammar."""
    if not is_choice(kind, spec):
        return None
    if kind == "grammar":
        return [json.loads(word) for word in re.findall(LITERAL, spec)]
    words = json.loads(spec)
    return words if isinstance(words, list) else None


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
