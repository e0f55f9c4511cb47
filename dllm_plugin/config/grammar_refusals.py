"""Refuse grammars that no backend reads, in sentences that name where they stand.

Imports no vLLM, so that a command can ask before it starts an engine.
"""

import json
import re
from typing import Any

import llguidance
from llguidance import LLMatcher

from dllm_plugin.grammar.patterns import LeftWhole, read_tokens, written_out
from dllm_plugin.grammar.schemas import least_names, loose_keyword, patterns_of

from .validation import shown

# What compilers answer, and the words for it.
REASONS = (
    (r"Unimplemented keys: \[(.*?)\]", "the keywords {0}"),
    (r"oneOf constraints", "oneOf with alternatives that may overlap"),
    (r"circular references .*///(\S+)", "a $ref to {0} in itself, beside keywords"),
    (r"Unknown format: (.*)", "format {0}"),
    (r"parse error:\s+(.*)\n[\s\S]*error: (.*)", "the expression {0!r} ({1})"),
    (r"lookarounds .* in regex /(.*)/", "{0!r}, which looks at the text around it"),
    (r"patternProperty regexes (.*) are", "patternProperties {0}, which may overlap"),
    (r"min/maxProperties", "minProperties or maxProperties beside optional ones"),
    (r"Resource '(.*?)' is not", "a $ref to {0}, which is no path in the schema"),
    (r"for integer range", "a bound beyond 64 bits"),
)
MOST_SHOWN = 200  # characters of a reason
# What vLLM 0.32 does not give to xgrammar, which would ignore it.
OF_ARRAYS = ("uniqueItems", "contains", "minContains", "maxContains")
FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname"),
    *("uuid", "uri", "uri-reference", "uri-template", "json-pointer"),
    "relative-json-pointer",
)


def refusal_of(field: str, error: object) -> str:
    """Return a sentence for what a compiler answers about the grammar in a field."""
    text = str(error)
    for expression, words in REASONS:
        if found := re.search(expression, text):
            reason = words.format(*found.groups())
            break
    else:
        words = text.removeprefix("Grammar error: ").partition("\n")[0]
        reason = f"an error ({words})"
    return (
        f"{field} has {reason[:MOST_SHOWN]}: neither xgrammar nor guidance reads that, so "
        "write it without."
    )


def check_regex(field: str, text: str) -> None:
    """Raise ValueError for an expression that backends misread."""
    try:
        written_out(text)
    except ValueError as error:
        raise ValueError(
            f"{field} {error}: leave it out, or write plain characters."
        ) from error


def check_schema(field: str, schema: Any) -> None:
    """Raise ValueError for a schema with a pattern or a count that backends misread."""
    for text in patterns_of(schema):
        try:
            read_tokens(text)
            continue
        except LeftWhole:
            refusal = "has flags, or classes of too many characters"
        except ValueError as error:
            refusal = str(error)
        raise ValueError(
            f"{field} has the pattern {shown(text)}, which {refusal}: write it with "
            "characters, classes, groups, | and repeats."
        )
    if least := least_names(schema):
        raise ValueError(
            f"{field} has minProperties {least}, and no backend keeps apart the names "
            "that a text chooses: require names of properties, or set additionalProperties to "
            "false."
        )


def check_unread_regex(field: str, text: str) -> None:
    """Raise ValueError for an expression that neither backend compiles."""
    check_regex(field, text)
    error = LLMatcher.validate_grammar(llguidance.grammar_from("regex", text), None)
    if not error:
        return
    if not _is_read_by_python(text) or not _is_read_by_xgrammar("regex", text):
        raise ValueError(refusal_of(field, error))


def check_unread_schema(field: str, schema: Any) -> None:
    """Raise ValueError for a schema that neither backend compiles."""
    check_schema(field, schema)
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema), None)
    if not error:
        return
    is_others = loose_keyword(schema) or is_for_others(schema)
    if is_others or not _is_read_by_xgrammar("json", json.dumps(schema)):
        raise ValueError(refusal_of(field, error))


def is_for_others(schema: Any) -> bool:
    """Return whether vLLM asks other backends than xgrammar about a schema; imports no vLLM."""
    if isinstance(schema, list):
        return any(map(is_for_others, schema))
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    names = schema.get("propertyNames")
    beside = {"patternProperties", "properties"} & set(schema)
    found = ["multipleOf" in schema and ("integer" in kinds or "number" in kinds)]
    if "array" in kinds:
        found.append(any(name in schema for name in OF_ARRAYS))
    if "string" in kinds:
        found += [schema.get("format", "uuid") not in FORMATS, _is_bounded(schema)]
    if "object" in kinds and "propertyNames" in schema:
        found += [bool(beside), isinstance(names, dict) and _is_bounded(names)]
        found.append(schema.get("unevaluatedProperties", True) is not True)
    if "object" in kinds and isinstance(
        patterns := schema.get("patternProperties"), dict
    ):
        found.append(len(beside) > 1 or len(patterns) > 1)
    parts = schema.get("allOf")
    found.append(isinstance(parts, list) and len(parts) > 1)
    return any(found) or any(map(is_for_others, schema.values()))


def _is_bounded(schema: dict[str, Any]) -> bool:
    """Return whether a schema bounds the length of a text that has a form."""
    has_form = "pattern" in schema or "format" in schema
    return has_form and ("minLength" in schema or "maxLength" in schema)


def _is_read_by_python(text: str) -> bool:
    """Return whether an expression is one at all, as far as Python can tell without torch."""
    try:
        re.compile(text)
    except (re.error, OverflowError):
        return False
    return True


def _is_read_by_xgrammar(kind: str, text: str) -> bool:
    """Return whether xgrammar compiles an expression or a schema."""
    from xgrammar import Grammar  # imports torch

    read = Grammar.from_regex if kind == "regex" else Grammar.from_json_schema
    try:
        read(text)
    except RuntimeError:
        return False
    return True
