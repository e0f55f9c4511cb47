"""Read the rules of requests' grammars, by which closings are found that no automaton knows."""

import json
from typing import Any

from vllm.logger import init_logger
from vllm.v1.structured_output.backend_types import (
    StructuredOutputKey,
    StructuredOutputOptions,
)
from xgrammar import Grammar

from dllm_plugin.grammar.chart import Chart
from dllm_plugin.grammar.expressions import Pattern
from dllm_plugin.grammar.networks import Unreadable
from dllm_plugin.grammar.rules import (
    FIRST_PATTERN,
    MOST_PATTERNS,
    read_regex,
    read_rules,
)
from dllm_plugin.grammar.schema_keywords import most_values, resolved
from dllm_plugin.grammar.vocabulary import Vocabulary

logger = init_logger("vllm.dllm_plugin")

# Alternatives up to which xgrammar 0.2.8 is quick: it takes 0.2 s for 5,000 and 10 s for 10,000,
# and guidance 0.3 s.
MANY = 4096
VALUES = ("enum", "const")
LOWER = ("minimum", "minLength", "minItems", "minProperties")
UPPER = ("maximum", "maxLength", "maxItems", "maxProperties")
LENGTHS = ("minLength", "maxLength")


def read_chart(
    named: StructuredOutputKey,
    vocabulary: Vocabulary,
    has_blanks: bool,
    is_closed: bool,
) -> Chart | None:
    """Return the chart of a grammar; None if its rules cannot be read.

    Args:
        has_blanks: JSON may have white space between its parts.
        is_closed: objects of JSON have no properties but those that a schema names.
    """
    kind, spec = named
    try:
        if kind == StructuredOutputOptions.REGEX:
            return Chart(*read_regex(spec), vocabulary)
        if kind == StructuredOutputOptions.GRAMMAR:
            read = Grammar.from_ebnf if "::=" in spec else Grammar.from_lark
            return Chart(*read_rules(str(read(spec))), vocabulary)
        if kind == StructuredOutputOptions.STRUCTURAL_TAG:
            rules = Grammar.from_structural_tag(spec)
            return Chart(*read_rules(str(rules)), vocabulary)
        if kind == StructuredOutputOptions.JSON_OBJECT:
            spec = '{"type": "object"}'
        elif kind != StructuredOutputOptions.JSON:
            return None
        patterns: list[Pattern] = []
        schema = json.loads(spec)
        if most_values(schema) > MANY:
            return None
        schema = _without_patterns(_without_all_of(schema, schema), patterns)
        grammar = Grammar.from_json_schema(
            json.dumps(schema, ensure_ascii=False),
            any_whitespace=has_blanks,
            separators=None if has_blanks else (",", ":"),
            strict_mode=is_closed,
        )
        return Chart(*read_rules(str(grammar), patterns), vocabulary)
    except (ValueError, TypeError, RuntimeError) as error:
        logger.debug("A grammar without a chart: %s", error)
        return None


def _without_all_of(schema: Any, root: Any) -> Any:
    """Return a schema with the branches of each `allOf` merged, of which xgrammar reads none."""
    if isinstance(schema, list):
        return [_without_all_of(inner, root) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    written = {}
    for name, inner in schema.items():
        is_value = name in VALUES
        written[name] = inner if is_value else _without_all_of(inner, root)
    branches = written.pop("allOf", [])
    for branch in branches if isinstance(branches, list) else []:
        found = resolved(branch, root)
        if found is not branch and "allOf" in found:
            raise Unreadable("allOf behind a reference within allOf")
        written = _merged(written, found)
    return written


def _merged(one: Any, other: Any) -> Any:
    """Return a schema that asks for what two schemas ask for, roughly."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one
    merged: dict[str, Any] = dict(one)
    for name, value in other.items():
        mine: Any = merged.get(name, value)
        if name == "required":
            value = list(dict.fromkeys([*mine, *value]))
        elif name in LOWER:
            value = max(mine, value)
        elif name in UPPER:
            value = min(mine, value)
        else:
            value = _merged(mine, value)
        merged[name] = value
    return merged


def _without_patterns(schema: Any, patterns: list[Pattern]) -> Any:
    """Return a schema with a character in place of each pattern, which is added to `patterns`."""
    if isinstance(schema, list):
        return [_without_patterns(inner, patterns) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    written = {}
    for name, value in schema.items():
        if name in VALUES:
            written[name] = value
        elif name == "pattern" and isinstance(value, str):
            written[name] = _marked(_pattern(value, schema), patterns)
        elif name == "patternProperties" and isinstance(value, dict):
            written[name] = {
                _marked(Pattern(pattern), patterns): _without_patterns(inner, patterns)
                for pattern, inner in value.items()
            }
        elif name not in LENGTHS or not isinstance(schema.get("pattern"), str):
            written[name] = _without_patterns(value, patterns)
    return written


def _pattern(text: str, schema: dict[str, Any]) -> Pattern:
    """Return a pattern with the least and most characters of its strings."""
    least, most = (schema.get(name) for name in LENGTHS)
    return Pattern(
        text,
        least if isinstance(least, int) else 0,
        most if isinstance(most, int) else None,
    )


def _marked(pattern: Pattern, patterns: list[Pattern]) -> str:
    """Add a pattern; return the character that stands for it."""
    if len(patterns) >= MOST_PATTERNS:
        raise Unreadable(f"more than {MOST_PATTERNS} patterns")
    patterns.append(pattern)
    return chr(FIRST_PATTERN + len(patterns) - 1)
