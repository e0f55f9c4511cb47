"""What compilers read in their own ways: texts of expressions are Python's, of schemas valid."""

import json
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_cases import valid
from grammar_loop import EOS, Compiler, ask, random_text, text_of
from vllm.sampling_params import StructuredOutputsParams

from dllm_plugin.config.request.structured_outputs import check_expressions
from dllm_plugin.grammar.automaton import DEAD, END, START
from dllm_plugin.grammar.patterns import written_out

pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
MOST = 60


@pytest.fixture(scope="module")
def compiler(single_rank: None) -> Iterator[Compiler]:
    compiler = Compiler("xgrammar")
    yield compiler
    compiler.close()


WRITTEN = {
    r"\w+": "[0-9A-Z\\u{5f}a-z]+",
    r"[^\W\d]": "[A-Z\\u{5f}a-z]",
    "^foo|bar$": "foo|bar",
    r"\A(?:^a|b)\Z": "(?:a|b)",
    "(^a)b*": "(a)b*",
    "[]a-]": "[\\u{2d}\\u{5d}a]",
    "[a&&b]": "[\\u{26}a-b]",
    r"\x5fa\u00e9\U0001F600\u{e9}": r"\u{5f}a\u{e9}\u{1f600}\u{e9}",
    r"\0\012": r"\u{0}\u{a}",
    "é日": "é日",
    "a{2,3}?b??": "a{2,3}?b??",
    "a{,3}b{,}c{1}": "a{0,3}b{0,}c{1}",
    "a{b{}{2": "a\\u{7b}b\\u{7b}}\\u{7b}2",
    "b*(a$)": "b*(a)",
    r"[\w\W][^\d]?": "[\\u{0}-\\u{d7ff}\\u{e000}-\\u{10ffff}]" + written_out(r"\D?"),
    r"\(?abc:": r"\u{28}?abc:",
    "[(?i)]": "[\\u{28}-\\u{29}\\u{3f}i]",
    "(?P<x>a)": "(?P<x>a)",
    r"\p{Zs}": r"[\u{20}\u{a0}\u{1680}\u{2000}-\u{200a}\u{202f}\u{205f}\u{3000}]",
    r"[\p{Zl}x]\p{Zp}": r"[x\u{2028}]\u{2029}",
    r"[^\PZ\p{Zs}]": r"[\u{2028}-\u{2029}]",
    r"\p{Ogham}": r"[\u{1680}-\u{169c}]",
    r"[a\p{Script=Ogham}]": r"[a\u{1680}-\u{169c}]",
    r"[^\P{Ogham}]": r"[\u{1680}-\u{169c}]",
    r"\P{^Ogham}": r"[\u{1680}-\u{169c}]",
    # Left to the compiler that knows them.
    "(?i)a.": "(?i)a.",
    "(?i:a).": "(?i:a).",
    "(?m)a.": "(?m)a.",
}


@pytest.mark.parametrize("pattern", WRITTEN)
def test_what_is_written(pattern: str) -> None:
    assert written_out(pattern) == WRITTEN[pattern]


REFUSED = {
    r"\g": "has '\\\\g', which compilers do not read alike",
    r"a\ud800": "has '\\\\ud800', which is no character",
    "a\\\ud800b": "has half of a surrogate pair",
    r"\p{Nothing}": "has 'Nothing', which is no property of Unicode",
    r"\p1": "has '\\\\p' without a property's name",
    "^(?!x)a": "has '(?!', which looks at the text around it",
    r"(?<=a)\w": "has '(?<=', which looks at the text around it",
    r"\bcat": "has '\\\\b', which looks at the text around it",
    r"(a)\1": "has '\\\\1', which repeats the text of a group",
    r"(?P<n>a)\k<n>": "has '\\\\k', which repeats the text of a group",
    "(?>a)b": "has '(?>', which compilers do not read alike",
    r"\h": "has '\\\\h', which compilers do not read alike",
    r"a\c": "has '\\\\c', which",
    "a\\": "has '\\\\', which",
    "a^b": "has '^' where no text begins",
    "c(a|^b)": "has '^' where",
    "$a": "has '$' where no text ends",
    r"(a\Z|b)c": "has '\\\\Z' where",
    "(^a)+": "has '^' in a group that repeats, or may be left out",
    "(^a)?b": "has '^' in a group",
    "a++": "has '+' after another repeat",
    "a{2}{3}": "has '{3}' after another repeat",
    "a*?*": "has '*' after another repeat",
    "((^a)b){2}": "has '^' in a group",
    "(a$)+": "has '$' where",
    r"[^\s\S]": "which no character fits",
    "[b-a]": "has 'b-a', which is no range of characters",
    "[" + "c" * 999 + "b-a]": "has 'b-a', which",
    r"[^\s\S" + "c" * 999 + "]": "cccc', which no character fits",
    "a*{" + "9" * 999 + "}": "9999' after another repeat",
    r"[\d-x]": "which is no range",
    "[a": "a class at character 1 that never ends",
    r"\D"
    * 200: "has classes that take more than 100000 characters when they are written out",
    r"\x4": "has '\\\\x', which is no character",
}


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:20])
def test_what_is_refused(pattern: str) -> None:
    asked = StructuredOutputsParams(regex=pattern)
    with pytest.raises(
        ValueError, match=f"^structured_outputs regex .*{re.escape(REFUSED[pattern])}"
    ) as raised:
        check_expressions(asked)
    assert len(str(raised.value)) < 250


OF_SCHEMAS = [
    ({"pattern": "(?m)^a"}, "'(?m)^a', which has flags, or classes of too many"),
    ({"patternProperties": {"a{2}{3}": {}}}, "'a{2}{3}', which has '{3}' after"),
    ({"items": {"pattern": r"\p{Nothing}"}}, "has 'Nothing', which is no property"),
    ({"$defs": {"a": {"pattern": "a*+b"}}}, "'a*+b', which has '+' after another"),
]


@pytest.mark.parametrize(("schema", "words"), OF_SCHEMAS, ids=str)
def test_patterns_of_schemas_that_are_refused(
    schema: dict[str, Any], words: str
) -> None:
    for spec in (schema, json.dumps(schema)):
        with pytest.raises(ValueError, match="^structured_outputs json ") as raised:
            check_expressions(StructuredOutputsParams(json=spec))
        assert words in str(raised.value)


OPEN: dict[str, Any] = {"type": "object", "minProperties": 2}
BY_PATTERN = {"patternProperties": {"^x": {}}, "additionalProperties": False}
NAMED = {"properties": {"a": {}, "b": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "is_read"),
    [
        (OPEN, False),
        ({"items": OPEN | BY_PATTERN}, False),
        ({"properties": {"c": {"minProperties": 3, "required": ["a"]}}}, False),
        (OPEN | {"minProperties": 1}, True),
        (OPEN | {"required": ["a"]}, True),
        (OPEN | NAMED, True),
        (OPEN | {"type": "string"}, True),
        ({"properties": {"minProperties": {"const": 2}}}, True),
    ],
    ids=str,
)
def test_a_count_of_names_that_a_text_chooses(
    schema: dict[str, Any], is_read: bool
) -> None:
    """Two equal names would be one property."""
    asked = StructuredOutputsParams(json=schema)
    if is_read:
        check_expressions(asked)
        return
    with pytest.raises(ValueError, match=r"json has minProperties \d, and no backend"):
        check_expressions(asked)


def test_many_categories_are_left_to_the_backend() -> None:
    """Written out they would be too long."""
    check_expressions(StructuredOutputsParams(regex=r"\p{L}" * 11))


PATTERNS = (
    *(".{4}", r"\w+@\w+\.com", r"[^\W\d]{3}", r"\D\S\W", r"\s\d", "[[:alpha:]&&x]{3}"),
    *(r"\A\d\Z", "^(?:a$|b.$)", r"[^a]{2}|[]\\]", r"\x5fa[\x5fa]", "[é-ü日]{2}"),
)
WAYS = ("xgrammar", "guidance", "automaton")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_of_expressions_are_pythons(
    pattern: str, way: str, compiler: Compiler
) -> None:
    rng = random.Random(pattern)
    with warnings.catch_warnings(
        action="ignore", category=FutureWarning
    ):  # of sets to come
        reader = re.compile(pattern)
    if way == "automaton":
        grammar = compiler.compile("regex", pattern, ask(MOST, dllm_grammar=way))
        state = compiler.compile("regex", pattern, ask(MOST)).state
        for _ in range(20):
            ids = random_text(state, rng, MOST)
            # What one way takes, so does another; with any other end it is Python's or refused.
            assert DEAD not in grammar.guide.follow(START, ids), text_of(state, ids)
            for other in ("\n", "\u0489", "é", "&", "["):
                changed = text_of(state, ids)[:-1] + other
                spelled = [
                    state.vocabulary.by_bytes[bytes([byte])]
                    for byte in changed.encode()
                ]
                ends = grammar.guide.follow(START, [*spelled, EOS])[-1] == END
                assert not ends or reader.fullmatch(changed), changed
        return
    state = compiler.compile("regex", pattern, ask(MOST), way).state
    for _ in range(20):
        ids = random_text(state, rng, MOST)
        assert ids[-1] != EOS or reader.fullmatch(text_of(state, ids)), text_of(
            state, ids
        )


def _closed(inner: dict[str, Any]) -> dict[str, Any]:
    fixed = {"type": "object", "required": ["a"], "additionalProperties": False}
    return fixed | {"properties": {"a": inner}}


ODD: list[dict[str, Any]] = [
    *({"type": "string", "format": name} for name in ("ipv4", "ipv6", "uuid", "email")),
    {"type": ["string", "null"], "format": "ipv4"},
    {"type": "string", "pattern": '^"[^"]\\\\\t$'},
    {"type": "string", "pattern": r"^\s[^\x20-\x7e]$"},
    {"format": "ipv4"},
    {"minItems": 1},
    {"minimum": 3, "maximum": 5},
    {"minProperties": 1, "type": "object", "additionalProperties": {"type": "null"}},
    {"type": "integer", "anyOf": [True, {"type": "null"}]},
    {
        "type": ["integer", "null"],
        "anyOf": [{"minimum": 7, "maximum": 9}, {"type": "null"}],
    },
    {"type": "string", "allOf": [{"minLength": 1}, {"maxLength": 2}]},
]


@pytest.mark.parametrize("schema", ODD, ids=json.dumps)
def test_texts_of_schemas_are_valid(schema: dict[str, Any], compiler: Compiler) -> None:
    rng = random.Random(str(schema))
    for form in (
        schema,
        _closed(schema),
        {"type": "array", "items": schema, "maxItems": 2},
    ):
        judge, state = valid(form), compiler.compile("json", form, ask(MOST)).state
        for _ in range(12):
            ids = random_text(state, rng, MOST)
            assert ids[-1] != EOS or judge(text_of(state, ids)), text_of(state, ids)
