"""Find keywords of a JSON schema that xgrammar does not honour.

Found by random texts of xgrammar 0.2.8, judged by jsonschema, for its test suite's schemas too.
What vLLM hands to another backend by itself is not looked for.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

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
# In such strings it takes what JSON must escape, and of a pattern it skips what looks around.
STRINGS = ("minLength", "maxLength", "pattern")
POINTERS = ("json-pointer", "relative-json-pointer")  # raw control characters as well
# A 31st of November and 01.02.03.04 are taken. For JSON schema a format is but a note.
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
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def loose_keyword(schema: Any) -> str:
    """Name what xgrammar does not read of a schema; empty if it reads all."""
    return _loose(schema, schema)


def most_values(schema: Any) -> int:
    """Return how many values, or alternatives, the longest list of a schema has."""
    if not isinstance(schema, dict):
        return 0
    lists = [
        schema[name] for name in ("enum", *LISTS) if isinstance(schema.get(name), list)
    ]
    return max([*map(len, lists), *map(most_values, _inner(schema))], default=0)


def has_rough_format(schema: Any) -> bool:
    """Return whether xgrammar reads a format of a schema less strictly than guidance."""
    if not isinstance(schema, dict):
        return False
    ignored = "format" in schema and "type" not in schema
    return (
        ignored
        or schema.get("format") in ROUGH
        or any(map(has_rough_format, _inner(schema)))
    )


def _loose(schema: Any, root: Any) -> str:
    if not isinstance(schema, dict):
        return ""
    found = _first(IGNORED, schema) or _beside(schema) or _type_beside(schema, root)
    found = found or _of_strings(schema) or _overlapping(schema, root)
    for inner in _inner(schema):
        found = found or _loose(inner, root)
    return found


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
    """Name alternatives with other types, beside which xgrammar ignores `type`."""
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
        known = [*kinds, "integer"] if "number" in kinds else kinds
        return all(kind in known for kind in _kinds(schema))
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


def _are_of(values: Any, kinds: list[str]) -> bool:
    """Return whether values are a list, all of one of some types."""
    return isinstance(values, list) and all(_is_of(value, kinds) for value in values)


def _is_of(value: Any, kinds: list[str]) -> bool:
    """Return whether a value is of one of some types."""
    for kind in kinds:
        if isinstance(value, TYPES.get(kind, ())) and (
            kind == "boolean" or not isinstance(value, bool)
        ):
            return True
    return False


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas in a schema."""
    for name in MAPS:
        inner = schema.get(name)
        yield from inner.values() if isinstance(inner, dict) else ()
    for name in LISTS:
        inner = schema.get(name)
        yield from inner if isinstance(inner, list) else ()
    for name in SINGLE:
        yield schema.get(name)
