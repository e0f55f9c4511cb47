"""Say which schemas xgrammar does not read as a whole, and which it reads less strictly."""

from typing import Any

import pytest
from grammar_cases import SCHEMAS

from dllm_plugin.grammar.schemas import has_rough_format, loose_keyword

AT = {"type": "string", "format": "time"}


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    fixed = {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
    }
    return fixed | {"properties": properties}


# As pydantic writes a union of models that a property tells apart.
KINDS = {"$defs": {name: _closed({"kind": {"const": name}, "at": AT}) for name in "ab"}}
CIRCLES = {
    "$defs": {name: _closed({"next": {"$ref": f"#/$defs/{name}"}}) for name in "ab"}
}
OVERLAP = "oneOf with alternatives that may overlap"
LOOSE: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "if": {"required": ["a"]}}, "if"),
    ({"type": "array", "items": {"not": {"type": "null"}}}, "not"),
    (_closed({"a": AT}) | {"anyOf": [{"required": ["a"]}]}, "properties beside anyOf"),
    ({"anyOf": [{"$ref": "#/$defs/x", "minimum": 3}]}, "minimum beside $ref"),
    ({"$ref": "#name"}, "a $ref that is no path in the schema"),
    ({"type": "string", "enum": ["a", 1]}, "type beside values of another one"),
    ({"type": "integer", "const": True}, "type beside values of another one"),
    ({"type": "string", "enum": ["a"], "minLength": 2}, "minLength beside enum"),
    ({"minimum": 3}, "minimum without type"),
    ({"format": "uuid"}, ""),
    ({"type": {}, "enum": [1]}, "type beside values of another one"),
    ({"minItems": 1}, "minItems without type"),
    ({"minContains": 1, "contains": AT}, "contains without type"),
    ({"type": ["string", "null"], "format": "json-pointer"}, "format"),
    ({"type": ["string", "null"], "format": "ipv4"}, ""),
    ({"type": "integer", "format": "int32"}, ""),
    ({"type": "string", "format": "uri-template"}, ""),
    ({"type": "string", "pattern": "^a$"}, "pattern"),
    ({"pattern": "^a$"}, "pattern"),
    ({"type": "integer", "pattern": "^a$"}, ""),
    ({"type": "integer", "anyOf": [True, AT]}, "type beside anyOf"),
    ({"type": "number", "oneOf": [{"type": "integer"}, {"enum": [0.5]}]}, OVERLAP),
    (
        {
            "type": ["number", "null"],
            "anyOf": [{"type": "integer"}, {"enum": [0.5, None]}],
        },
        "",
    ),
    (
        {"type": "object", "allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": AT}},
        "type beside allOf",
    ),
    ({"type": "string", "$ref": "#/$defs/x", "$defs": {"x": AT}}, ""),
    ({"type": "object", "$ref": "#/$defs/x", "$defs": {"x": AT}}, "type beside $ref"),
    ({"type": "string", "minLength": 2}, "minLength"),
    ({"type": ["null", "string"], "maxLength": 2}, "maxLength"),
    ({"oneOf": [AT, AT | {"minimum": 3}]}, OVERLAP),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, OVERLAP),
    ({"oneOf": [AT, {"type": "null"}, {"enum": ["a"]}]}, OVERLAP),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, OVERLAP),
    ({"oneOf": [{"const": {"a": 1}}, {"const": {"a": 2}}]}, OVERLAP),
    ({"oneOf": [{"const": True}, {"const": 1}]}, ""),
    (
        {
            "oneOf": [
                {"type": "object", "required": True},
                {"type": "object", "properties": []},
            ]
        },
        OVERLAP,
    ),
    (CIRCLES | {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, OVERLAP),
    ({"oneOf": [AT, {"type": "null"}, {"type": "integer"}]}, ""),
    ({"oneOf": [{"enum": ["a", 1]}, {"const": "b"}, {"const": 2}]}, ""),
    (KINDS | {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, ""),
    (KINDS | {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}, OVERLAP),
    (
        {"type": "object", "properties": {}, "required": ["z"]},
        "required of what properties lacks",
    ),
    (_closed({"not": AT, "if": {"type": "integer", "minimum": 3}, "required": AT}), ""),
    (
        {
            "type": "string",
            "enum": ["not", "if"],
            "default": {"not": 1},
            "description": "if",
        },
        "",
    ),
    ({"type": ["string", "null"], "const": None}, ""),
    (
        {
            "$defs": {"x": AT},
            "anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#"}],
            "title": "T",
        },
        "",
    ),
]


@pytest.mark.parametrize(("schema", "found"), LOOSE)
def test_what_xgrammar_does_not_read(schema: dict[str, Any], found: str) -> None:
    assert loose_keyword(schema) == found


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_xgrammar_reads_most_schemas_of_the_tests(name: str) -> None:
    strict = {
        "short_text": "minLength",
        "long_text": "minLength",
        "nothing_long": "maxLength",
    }
    strict |= {"pattern": "pattern", "quoted": "pattern"}
    strict |= {"narrowed": "type beside anyOf"}
    assert loose_keyword(SCHEMAS[name]) == strict.get(name, "")


ROUGH = [
    (_closed({"a": {"type": "string", "format": "date"}}), True),
    ({"type": "array", "items": {"type": ["string", "null"], "format": "ipv4"}}, True),
    ({"format": "int64"}, True),  # without a type it counts for nothing
    ({"type": "integer", "format": "int64"}, False),
    (_closed({"a": AT, "format": {"type": "null"}}), False),
]


@pytest.mark.parametrize(("schema", "rough"), ROUGH)
def test_what_xgrammar_reads_less_strictly(schema: dict[str, Any], rough: bool) -> None:
    assert has_rough_format(schema) is rough and not loose_keyword(schema)
