"""Grammars that neither backend compiles are refused before a command imports vLLM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_admission import BY_GUIDANCE

from dllm_plugin.commands import cli
from dllm_plugin.config.grammar_refusals import (
    check_unread_regex,
    check_unread_schema,
    is_for_others,
)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strin"}, "an error (Invalid type: strin)"),
        ({"not": {}}, 'the keywords "not"'),
        ({"pattern": "("}, "the expression '(' (unclosed group)"),
        ({"pattern": "a(?=b)"}, "the pattern 'a(?=b)', which has '(?='"),
        ({"minProperties": 2}, "minProperties 2, and no backend"),
    ],
    ids=str,
)
def test_a_schema(
    schema: dict[str, Any],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", None)
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    for given, named in ((str(file), f" {file}"), (json.dumps(schema), "")):
        assert cli.main(["generate", "x", "--json-schema", given]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"diffuplug: error: --json-schema{named} has {words}")
        assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "schema",
    [{"type": "object"}, {"type": "string", "format": "uri-template"}],
    ids=str,
)
def test_a_schema_that_one_backend_compiles(schema: dict[str, Any]) -> None:
    check_unread_schema("--json-schema", schema)


STRING = {"type": "string"}
FOR_OTHERS: list[dict[str, Any]] = [
    STRING | {"format": "color"},
    STRING | {"pattern": "a", "maxLength": 3},
    {"type": ["array", "null"], "uniqueItems": False},
    {"type": "array", "contains": {}},
    {"type": "integer", "multipleOf": 3},
    {"type": "object", "patternProperties": {"^a": {}, "^b": {}}},
    {"type": "object", "patternProperties": {"^a": {}}, "properties": {}},
    {"type": "object", "propertyNames": {"pattern": "a", "minLength": 2}},
    {"type": "object", "propertyNames": {}, "properties": {}},
    {"type": "object", "propertyNames": {}, "unevaluatedProperties": False},
    {"allOf": [{}, {}]},
    {"anyOf": [{"items": STRING | {"format": "regex"}}]},
]
FOR_XGRAMMAR: list[dict[str, Any]] = [
    STRING | {"format": "uuid", "pattern": "a"},
    {"uniqueItems": True},
    {"type": "array", "multipleOf": 2, "format": "color"},
    {"type": "object", "patternProperties": {"^a": STRING}},
    {"type": "object", "propertyNames": {"maxLength": 2}},
    {"allOf": [{}], "items": {"minimum": 1}},
]


@pytest.mark.parametrize("schema", FOR_OTHERS + FOR_XGRAMMAR, ids=str)
def test_what_vllm_gives_to_other_backends(schema: dict[str, Any]) -> None:
    """Known without vLLM, as vLLM knows it."""
    from vllm.v1.structured_output import backend_xgrammar

    theirs = backend_xgrammar.has_xgrammar_unsupported_json_features(schema)
    assert is_for_others(schema) == theirs == (schema in FOR_OTHERS)


@pytest.mark.parametrize(
    "schema",
    [
        STRING | {"format": "idn-email"},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "null"}},
    ],
    ids=str,
)
def test_a_schema_is_refused_without_torch(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ValueError, match="neither xgrammar nor guidance reads that"):
        check_unread_schema("--json-schema", schema)


@pytest.mark.parametrize("name", BY_GUIDANCE)
def test_a_schema_that_moves_to_guidance(name: str) -> None:
    check_unread_schema("--json-schema", BY_GUIDANCE[name])


@pytest.mark.parametrize("text", ["(", "a{,2}"])
def test_an_expression(
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", None)
    assert cli.main(["generate", "x", "--regex", text]) == 2
    printed = capsys.readouterr().err
    start = f"diffuplug: error: --regex has the expression {text!r}"
    assert printed.startswith(start) and printed.count("\n") == 1


@pytest.mark.parametrize("text", [r"[0-9]+", r"\Aab\Z", r"[\w]\Z"])
def test_an_expression_that_one_backend_compiles(text: str) -> None:
    check_unread_regex("--regex", text)
