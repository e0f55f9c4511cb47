"""Find what xgrammar ignores of a JSON schema, so that its texts would not be valid under it.

Found by random texts of xgrammar 0.2.8, judged by jsonschema. What vLLM hands to another backend by
itself is not looked for.
"""

from collections.abc import Iterator
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
BOUNDS = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
)
# What says something of a value, besides `type`.
ASSERTING = (
    *(*BRANCHES, *VALUES, *BOUNDS),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "unevaluatedProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
)
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "contains")
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def ignored_keyword(schema: Any) -> str:
    """Say in a few words which keyword counts for nothing; empty if all of them count."""
    if not isinstance(schema, dict):
        return ""
    found = next((name for name in IGNORED if name in schema), "")
    return found or _beside(schema) or next(filter(None, map(ignored_keyword, _inner(schema))), "")


def _beside(schema: dict[str, Any]) -> str:
    """Say which keyword counts for nothing because of others in the same place."""
    asserting = [name for name in ASSERTING if name in schema]
    for name in (*BRANCHES, *VALUES):
        others = [other for other in asserting if other != name]
        if name in asserting and others:
            return f"{others[0]} beside {name}"
    reference = schema.get("$ref", "#")
    if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
        return "a $ref that is no path in the schema"
    if "type" not in schema:
        bound = next((name for name in BOUNDS if name in schema), "")
        return f"{bound} without type" if bound else _unknown(schema)
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if isinstance(values, list) and not all(_is_of(value, schema["type"]) for value in values):
        return "type beside values of another one"
    return _unknown(schema)


def _unknown(schema: dict[str, Any]) -> str:
    """Say whether a property is required that the schema does not describe."""
    required, described = schema.get("required"), schema.get("properties", {})
    if not (isinstance(required, list) and isinstance(described, dict)):
        return ""
    return "required of what properties lacks" if set(map(str, required)) - set(described) else ""


def _is_of(value: Any, kinds: Any) -> bool:
    """Tell whether a value is of one of the types of a schema."""
    for kind in kinds if isinstance(kinds, list) else [kinds]:
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
