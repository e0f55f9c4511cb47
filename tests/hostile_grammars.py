"""Grammars that are broken, endless, too large or without a text, and what each has to come to."""

import json
import re
from collections.abc import Callable
from typing import Any

from grammar_cases import SCHEMAS, schema_case, valid


def nested(levels: int) -> dict[str, Any]:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        deep = {"type": "array", "items": deep, "minItems": 1}
    return deep


def begins_levels(text: str) -> bool:
    """Judge the beginning of 60 levels: with what it lacks it is a whole text of them."""
    left = 60 - text.count("[")
    return left > 0 and valid(nested(60))(text + "[" * left + "0" + "]" * 60)


def is_long_text(text: str) -> bool:
    """Judge 60 letters, or as many as fit: with what it lacks it is a whole text."""
    lacking = "" if re.search(r'"\s*}\s*$', text) else "x" * 60 + '"}'
    return bool(schema_case("long_text").judge(text + lacking))


WORDS = [f"word {i} of many" for i in range(10_000)]
NO_TEXT = {"type": "object", "properties": {"s": {"enum": []}}, "required": ["s"]}
COMPILED = "structured_outputs cannot be honoured"  # what only the compiler finds out
# name: what is asked for, with 40 tokens, and what judges its text or stands in its refusal.
HOSTILE: dict[str, tuple[dict[str, Any], Callable[[str], bool] | str]] = {
    "no text at all": ({"json": {"enum": []}}, "Unsatisfiable schema"),
    "no text of a property": (
        {"json": NO_TEXT},
        "required property 's' is unsatisfiable",
    ),
    "no ending": ({"grammar": 'root ::= "a" root'}, lambda text: text == "a" * 40),
    "only itself": (
        {"grammar": "root ::= root"},
        f"{COMPILED}: the grammar allows no text",
    ),
    "10,000 choices": ({"choice": WORDS}, lambda text: text in WORDS),
    "10,000 constants": (
        {"json": {"enum": WORDS}},
        lambda text: json.loads(text) in WORDS,
    ),
    "100 levels": ({"json": nested(100)}, "nested too deeply"),
    "60 levels": ({"json": nested(60)}, begins_levels),
    "8 levels": (
        {"json": nested(8)},
        valid(nested(8)),
    ),  # what an automaton has room for
    "longer than may be": ({"json": SCHEMAS["long_text"]}, is_long_text),
    "60 letters": ({"regex": "a{60}"}, lambda text: text == "a" * 40),
    "unicode": ({"json": SCHEMAS["unicode"]}, schema_case("unicode").judge),
    "nothing long": (
        {"json": SCHEMAS["nothing_long"]},
        schema_case("nothing_long").judge,
    ),
    "backtracking": (
        {"regex": "([a-z]+)+q"},
        lambda text: re.fullmatch("[a-z]+q", text) is not None,
    ),
    "backtracking to an anchor": (
        {"regex": "([a-z]+)+$"},
        lambda text: re.fullmatch("[a-z]+", text) is not None,
    ),
    # No expression to xgrammar; vLLM asks guidance then, which would take it for an `a`.
    "unfinished": ({"regex": "a\\"}, "structured_outputs regex has '\\\\', which"),
    "no schema": ({"json": {"type": "no such type"}}, "Invalid type: no such type"),
    "endless reference": (
        {"json": {"$ref": "#"}},
        f"{COMPILED}: the grammar allows no text",
    ),
}
