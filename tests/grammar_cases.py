"""Grammars for the tests, each with a judge that shares nothing with the decoder."""

import json
import random
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A grammar: `kind` and `spec` as in StructuredOutputsParams, and what judges a text."""

    kind: str
    spec: Any
    judge: Callable[[str], bool]


def _closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object that holds all of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


TEXT: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
NUMBERS: dict[str, Any] = {"type": "array", "items": INTEGER}
CALL = [
    _closed(
        {
            "name": {"const": "look_up"},
            "arguments": _closed({"word": TEXT, "limit": INTEGER}),
        }
    ),
    _closed({"name": {"const": "finish"}, "arguments": _closed({})}),
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "answer": _closed({"steps": {"type": "array", "items": TEXT}, "answer": INTEGER}),
    "flat": _closed({"name": TEXT, "age": INTEGER, "member": {"type": "boolean"}}),
    "nested": _closed(
        {"at": _closed({"x": {"type": "number"}, "y": {"type": "number"}})}
    ),
    "deep": _closed(
        {"a": _closed({"b": _closed({"c": _closed({"d": {"type": "null"}})})})}
    ),
    "enum": _closed(
        {"colour": {"enum": ["red", "green", "blue"]}, "size": {"enum": [1, 2, None]}}
    ),
    "constant": _closed({"kind": {"const": "point"}, "version": {"const": 3}}),
    "optional": _closed({"a": TEXT, "b": INTEGER, "c": {"type": "null"}}, required=[]),
    "some_required": _closed({"id": INTEGER, "note": TEXT}, required=["id"]),
    "any_of": {"anyOf": [_closed({"error": TEXT}), NUMBERS | {"minItems": 2}]},
    "one_of": {"oneOf": [INTEGER, {"type": "boolean"}, {"type": "null"}]},
    "bounded_list": _closed(
        {"tags": {"type": "array", "items": INTEGER, "maxItems": 3}}
    ),
    "filled_list": {"type": "array", "items": _closed({"n": INTEGER}), "minItems": 1},
    "short_text": _closed({"code": TEXT | {"minLength": 2, "maxLength": 4}}),
    "pattern": _closed({"date": TEXT | {"pattern": "^[0-9]{4}-[01][0-9]-[0-3][0-9]$"}}),
    "format": _closed({"id": TEXT | {"format": "uuid"}}),
    "range": _closed({"percent": INTEGER | {"minimum": 0, "maximum": 100}}),
    "recursive": {
        "$defs": {
            "tree": _closed(
                {
                    "v": INTEGER,
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                }
            )
        },
        "$ref": "#/$defs/tree",
    },
    "calls": {"type": "array", "minItems": 1, "items": {"anyOf": CALL}},
    "extra": {"type": "object", "additionalProperties": INTEGER},
    "long": _closed({f"field_{i}": INTEGER for i in range(10)}),
    "long_text": _closed({"text": TEXT | {"minLength": 60}}),
    "unicode": _closed({"größe": INTEGER, "名前": {"enum": ["é", "日本"]}}),
    "empty": _closed({}),
    "nothing_long": _closed({"s": TEXT | {"maxLength": 0}}),
    "address": _closed({"at": TEXT | {"format": "ipv4"}}),
    "quoted": _closed({"s": TEXT | {"pattern": r'^"[^\t"]\\?"$'}}),
    "narrowed": {
        "type": "integer",
        "anyOf": [{"minimum": 7, "maximum": 12}, {"const": 3}],
    },
}


def valid(schema: dict[str, Any]) -> Callable[[str], bool]:
    """Judge whole texts of a schema by jsonschema."""
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(
        schema, format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    return lambda text: bool(validator.is_valid(json.loads(text)))


def schema_case(name: str) -> Case:
    """One of SCHEMAS."""
    return Case("json", SCHEMAS[name], valid(SCHEMAS[name]))


PARTS = ("[0-9]", "[a-z]", "[A-F]", "cat", "q", "[xyz]", r"\.", "on", "off", "_")
# What compilers read in their own ways.
CLASSES = (
    ".",
    r"\w",
    r"\d",
    r"\s",
    r"\S",
    r"[^\W\d]",
    r"[^a\n]",
    "[a&&b]",
    "[[:a]",
    r"[\x5fa]",
)


def regex_case(rng: random.Random, parts: Sequence[str] = PARTS) -> Case:
    """A random regular expression, judged by re."""
    pattern = _regex(rng, 0, parts) + _regex(rng, 0, parts)
    return Case("regex", pattern, lambda text: _fits(pattern, text))


def _fits(pattern: str, text: str) -> bool:
    with warnings.catch_warnings(
        action="ignore", category=FutureWarning
    ):  # of sets to come
        return re.fullmatch(pattern, text) is not None


def _regex(rng: random.Random, depth: int, parts: Sequence[str]) -> str:
    if depth == 3 or rng.random() < 0.35:
        return rng.choice(parts)
    inner = [_regex(rng, depth + 1, parts) for _ in range(rng.randint(1, 3))]
    form = rng.random()
    if form < 0.4:
        return "".join(inner)
    if form < 0.65:
        return f"(?:{'|'.join(inner)})"
    least = rng.randint(0, 3)
    counted = f"{{{least},{least + rng.randint(0, 4)}}}"
    return f"(?:{''.join(inner)}){rng.choice(['*', '+', '?', counted, f'{{{least + 1}}}'])}"


WORDS = ("left", "right", "up", "upper", "a", "ab", "abc", "not today", "ja", "nein")


def choice_case(rng: random.Random) -> Case:
    """A few words to choose from."""
    words = rng.sample(WORDS, rng.randint(1, 5))
    return Case("choice", words, lambda text: text in words)


def grammar_case(rng: random.Random) -> Case:
    """A random recursive grammar, judged by lark's Earley parser."""
    import lark

    names = ["top", "one", "two", "six"]
    terminals = ["(", ")", "[", "]", "+", "k", "mn", ";"]
    rules: dict[str, list[list[str]]] = {}
    for name in names:
        ends = [json.dumps(rng.choice(["x", "yy", "7", "fin"]))]
        longer = []
        for _ in range(rng.randint(1, 2)):
            # A terminal in front keeps left recursion out.
            parts = [json.dumps(rng.choice(terminals))]
            for _ in range(rng.randint(1, 3)):
                own = rng.random() < 0.5
                parts.append(
                    rng.choice(names[1:]) if own else json.dumps(rng.choice(terminals))
                )
            longer.append(parts)
        rules[name] = [ends, *longer]

    def written(sign: str, first: str) -> str:
        options = {
            name: " | ".join(map(" ".join, rule)) for name, rule in rules.items()
        }
        named = {
            first if name == "top" else name: text for name, text in options.items()
        }
        return "\n".join(f"{name} {sign} {text}" for name, text in named.items())

    parser = lark.Lark(written(":", "start"), parser="earley", lexer="dynamic_complete")

    def judge(text: str) -> bool:
        try:
            parser.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    return Case("grammar", written("::=", "root"), judge)


def random_case(rng: random.Random) -> Case:
    """One of all of these."""
    draw = rng.random()
    if draw < 0.4:
        return schema_case(rng.choice(list(SCHEMAS)))
    if draw < 0.65:
        return regex_case(rng, PARTS + CLASSES)
    return choice_case(rng) if draw < 0.75 else grammar_case(rng)
