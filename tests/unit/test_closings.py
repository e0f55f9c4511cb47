"""Closings of grammars whose progress no set of allowed tokens shows: every text is complete."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import regex
from grammar_cases import Case
from grammar_loop import (
    EOS,
    VOCAB,
    Compiler,
    ask,
    judged,
    random_text,
    text_of,
)

from dllm_plugin.grammar.closings import closes
from dllm_plugin.grammar.state import GrammarState

# vLLM gives xgrammar an argument that it no longer reads.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
QUICK = 200
CANVAS = 8
# Patterns of public schemas, each with a text of few tokens that it takes.
PATTERNS = {
    "ab": "ab",
    "[A-Z]{3}": "AAA",
    r"\.json$": ".json",
    "TODO": "TODO",
    "https?://": "http://",
    r"\d{2}:\d{2}": "00:00",
    r"^.+@.+\..+$": "a@a.a",
    r"^(?:[a-z0-9-]+\.)+[a-z]{2,}$": "a.aa",
    "^[0-9]*77$": "77",
    r"^\S+@\S+\.\S+$": "a@a.a",
    "^[a-z0-9-]+/[a-z0-9-]+$": "a/a",
    r"^[^\s]+ [^\s]+ [^\s]+$": "a a a",
    "^(?:.*/)?Dockerfile$": "Dockerfile",
    r"^[\w.-]+@[\w-]+\.[a-z]{2,3}$": "a@a.aa",
    "^.{0,100}!!$": "!!",
    "^[a-z]+(_[a-z]+){2}$": "a_a_a",
    r"\$\{[^}]+\}": "${a}",
    "^([0-9a-f]{2}:){5}[0-9a-f]{2}$": "00:00:00:00:00:00",
    r"^v[0-9]+(\.[0-9]+)*$": "v0",
    "(GET|POST) /": "GET /",
    "^[A-Za-z0-9+/]*==$": "==",
    "^.*[0-9]{4}.*$": "0000",
    "^[A-Z]{2}[0-9]{2}[A-Z0-9]{11,30}$": "AA00AAAAAAAAAAA",
    "^a|b$": "a",
    '^["\\\\]{2}é$': '""é',
}
# Python's re does not read these.
CATEGORIES = {
    r"\p{Greek}": "Ͱ",
    r"^\p{Script=Cyrillic}\p{Alphabetic}$": "Ѐa",
    r"\p{Uppercase_Letter}{2}": "AA",
    r"^([\p{L}\p{M}]+ ){12}$": "a " * 12,
    "^(?i:ok)!$": "OK!",
    r"^(a|ab)*b$": "b",
    r"(^|,)a(,|$)": "a",
    r"[^\s\x20-\x7e]{2}": "\u0080\u0080",
    "^[[:alpha:]]+$": "a]",
    r"\p{L}+": "a",
    r"\pL\pN$": "a0",
    r"^\p{Lu}\p{Ll}+( \p{Nd}{2})?$": "Aa",
}
RULES = {
    "a word after anything": ('root ::= [^;]* "; done."', r"[^;]*; done\."),
    "a count": ("root ::= [a-z]{0,9} [a-f]{7} [a-z]*", r"[a-z]{0,9}[a-f]{7}[a-z]*"),
    "lark": (
        "start: WORD (SEP WORD)*\nWORD: /[a-z]*ing/\nSEP: /[ ,]+/",
        "[a-z]*ing([ ,]+[a-z]*ing)*",
    ),
}


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def compiler(request: pytest.FixtureRequest, single_rank: None) -> Iterator[Compiler]:
    compiler = Compiler(request.param)
    yield compiler
    compiler.close()


def pattern_case(pattern: str, rng: random.Random) -> Case:
    """A pattern by itself, or of an optional property beside others."""
    text = {"type": "string", "pattern": pattern}
    if rng.random() < 0.5:
        schema = text
    else:
        properties = {"note": {"type": "string"}, "code": text, "more": text}
        required = ["code"] if rng.random() < 0.5 else []
        schema = {"type": "object", "properties": properties, "required": required}

    def judge(written: str) -> bool:
        value = json.loads(written)
        if schema is text:
            return re.search(pattern, value) is not None
        found = [value[name] for name in ("code", "more") if name in value]
        return set(schema.get("required", ())) <= value.keys() and all(
            re.search(pattern, one) for one in found
        )

    return Case("json", schema, judge)


UNICODE = [
    r"\p{Greek}",
    r"[\p{Cyrillic}\d]",
    r"\p{Lu}",
    "[^\\P{Han}]",
    r"[^\s\x20-\x7e]",
]
ATOMS = [
    "a",
    "b",
    ";",
    "[^;]",
    "[a-c]",
    r"\d",
    r"\w",
    r"\.",
    ".",
    '"',
    "é",
    "(?:x{1,3})",
]
FORMATS = ("date", "uuid", "email", "ipv6", "ipv4", "time", "date-time", "hostname")


def random_pattern(rng: random.Random, depth: int = 0) -> str:
    """A pattern of a schema, with groups, counts and anchors amid alternatives."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        if depth < 2 and rng.random() < 0.25:
            inner = [random_pattern(rng, depth + 1) for _ in range(rng.randint(1, 3))]
            part = f"({rng.choice(['', '?:'])}{'|'.join(inner)})"
        else:
            part = rng.choice(ATOMS if rng.random() < 0.8 else UNICODE)
        parts.append(part + rng.choice(["", "", "", "*", "+", "?", "{2}", "{1,4}"]))
    begin = rng.choice(["", "", "^", "(^|,)", "^(?:a|ab)*b"])
    end = rng.choice(["", "", "$", "(;|$)", " end"])
    return begin + "".join(parts) + end if depth == 0 else "".join(parts)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of nested objects, whose names and values have patterns, and of lists."""
    kind = rng.random()
    if depth == 3 or kind < 0.35:
        text: dict[str, Any] = {"type": "string", "pattern": random_pattern(rng)}
        if rng.random() < 0.2:
            text = {
                "type": "string",
                "pattern": rng.choice(["^[a-z ]*$", "b", "^.{3}"]),
            }
            text |= {"minLength": rng.randint(1, 4), "maxLength": rng.randint(4, 9)}
        return text
    if kind < 0.45:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind < 0.55:
        return {"enum": ["a", "b c", 'd"', "é"]}
    inner = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    if kind < 0.65:
        return {"type": "array", "prefixItems": inner, "minItems": len(inner)}
    if kind < 0.75:
        return {"type": "array", "items": inner[0], "minItems": rng.randint(0, 2)}
    names = [f"k{i}" for i in range(len(inner))]
    schema = {"type": "object", "properties": dict(zip(names, inner, strict=True))}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    schema["additionalProperties"] = False
    if rng.random() < 0.3:
        schema["patternProperties"] = {"^x-[a-c]+$": {"type": "integer"}}
    return schema


def schema_case(rng: random.Random) -> Case:
    """A random schema, a part of it by references."""
    schema = random_schema(rng)
    if rng.random() < 0.3:
        properties = {"a": {"$ref": "#/$defs/b"}}
        inner = {"type": "object", "properties": {"c": {"$ref": "#/$defs/c"}}}
        schema = {
            "type": "object",
            "properties": properties,
            "required": ["a"],
            "$defs": {"b": inner | {"required": ["c"]}, "c": schema},
        }

    def judge(text: str) -> bool:
        return fits(json.loads(text), schema, schema)

    return Case("json", schema, judge)


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value fits such a schema; formats are left to the backend."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"][-1]], root)
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "string":
        length = (
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 999)
        )
        return length and regex.search(schema.get("pattern", ""), value) is not None
    if schema["type"] == "integer":
        return isinstance(value, int)
    if schema["type"] == "array":
        inner = schema.get("prefixItems", [])
        items = [*inner, *[schema.get("items", {})] * (len(value) - len(inner))]
        return len(value) >= schema["minItems"] and all(
            not form or fits(item, form, root)
            for item, form in zip(value, items, strict=True)
        )
    named, others = schema["properties"], schema.get("patternProperties", {})
    return set(schema["required"]) <= set(value) and all(
        fits(inner, named.get(name, others.get("^x-[a-c]+$", {"enum": []})), root)
        for name, inner in value.items()
        if name in named or "additionalProperties" in schema
    )


def automaton_case(rng: random.Random, most_states: int = 200) -> Case:
    """Rules that are a random automaton, most of whose states allow the same letters."""
    states = rng.randrange(3, most_states)
    steps: list[dict[str, int]] = []
    for state in range(states):
        letters = "ab" if rng.random() < 0.8 else rng.sample("abcd", 3)
        steps.append({letter: rng.randrange(states) for letter in letters})
        # A way to the end, as long as states are few; else it takes luck.
        steps[state][rng.choice("ab")] = min(state + rng.randrange(1, 9), states - 1)
    rules = ["root ::= s0"]
    for state, edges in enumerate(steps):
        ways = [f'"{letter}" s{to}' for letter, to in edges.items()]
        if state == states - 1:
            ways.append('"."')
        rules.append(f"s{state} ::= {' | '.join(ways)}")

    def judge(text: str) -> bool:
        state = 0
        for letter in text[:-1]:
            if letter not in steps[state]:
                return False
            state = steps[state][letter]
        return state == states - 1 and text[-1:] == "."

    return Case("grammar", "\n".join(rules), judge)


def random_case(rng: random.Random) -> Case:
    kind = rng.random()
    if kind < 0.3:
        return automaton_case(rng)
    if kind < 0.7:
        return schema_case(rng)
    if kind < 0.75:
        spec, expression = RULES[rng.choice(list(RULES))]
        return Case("grammar", spec, lambda text: bool(re.fullmatch(expression, text)))
    return pattern_case(rng.choice(list(PATTERNS)), rng)


@pytest.mark.parametrize("pattern", PATTERNS | CATEGORIES)
def test_a_pattern_closes(compiler: Compiler, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    state = compiler.compile("json", schema, ask(60)).state
    assert state.completes and closes(state.matcher, state.witness)
    text = json.dumps((PATTERNS | CATEGORIES)[pattern], ensure_ascii=False).encode()
    assert len(state.vocabulary.text(state.witness)) <= len(text)
    assert not state.searches


@pytest.mark.parametrize("at_least_one", [True, False])
def test_a_tag_closes(single_rank: None, at_least_one: bool) -> None:
    """A tag that must come has a chart; inside another tag the search finds the end."""
    compiler = Compiler("xgrammar")
    content = {"type": "integer", "minimum": 10}
    tag = {"type": "tag", "begin": "<call>", "end": "</call>"}
    tag["content"] = {"type": "json_schema", "json_schema": content}
    tags = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag]}
    if at_least_one:
        tags |= {"at_least_one": True, "stop_after_first": True}
    spec = json.dumps({"type": "structural_tag", "format": tags})
    state = compiler.compile("structural_tag", spec, ask(60)).state
    assert state.completes and closes(state.matcher, state.witness)
    ids = state.vocabulary.encode(b"<call>")
    if not at_least_one:
        assert state.witness == []
    check = state.check([*ids, -1])
    assert check.settled == ids and not check.rejected
    assert (state.searches > 0) != at_least_one
    text = state.vocabulary.text(state.witness).decode()
    assert re.fullmatch("<call>[1-9][0-9]+</call>", text)
    compiler.close()


def test_what_fits_closes(compiler: Compiler) -> None:
    """The shortest text is taken, after any beginning of a text as well."""
    for seed in range(20):
        rng = random.Random(seed)
        case = automaton_case(rng, 60)
        state = compiler.compile(case.kind, case.spec, ask(200)).state
        assert state.completes and not state.searches
        least = len(state.witness)
        assert compiler.compile(case.kind, case.spec, ask(least)).state.completes
        ids = [i for i in random_text(state, rng, 40) if i not in state.stops]
        check = state.check([*ids, -1])
        assert check.settled == ids and not check.rejected


def decode(
    state: GrammarState, rng: random.Random, wants: list[int] | None, fault: float
) -> list[int]:
    """Decode a canvas of random drafts, which want one text with faults."""
    output: list[int] = []
    canvas: list[int] = []

    def draft(position: int) -> int:
        is_wanted = wants is not None and position < len(wants)
        if is_wanted and rng.random() >= fault:
            return wants[position]
        return rng.randrange(EOS)

    while state.left > 0 and not state.ended:
        check = state.check(canvas)
        known = [*check.settled, *check.forced]
        drafts = [] if check.rejected else canvas[len(known) + 1 :]
        assert state.commit(known)
        output += known
        canvas = []
        if check.allowed is not None:
            bits = np.unpackbits(check.allowed.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[:VOCAB]).tolist()
            wanted = draft(len(output))
            canvas = [wanted if wanted in allowed else rng.choice(allowed)]
        drafts += [-1] * (CANVAS - len(drafts))
        for i, token in enumerate(drafts):
            if token < 0 and rng.random() < 0.4:
                drafts[i] = draft(len(output) + 1 + i)
        canvas += drafts
    return output


def close_random_texts(compiler: Compiler, trials: int) -> None:
    """Random grammars and drafts, in budgets just above the shortest text and beyond."""
    for seed in range(trials // 2):
        rng = random.Random(f"{compiler.backend} {seed}")
        case = random_case(rng)
        state = compiler.compile(case.kind, case.spec, ask(200)).state
        assert state.completes, case.spec
        most = min(len(state.witness) + rng.choice([0, 1, 5, 30, 100]), 200)
        state = compiler.compile(case.kind, case.spec, ask(most)).state
        assert state.completes, case.spec
        wants = random_text(state, rng, 120) if rng.random() < 0.5 else None
        output = decode(state, rng, wants, rng.choice([0.0, 0.05, 0.3]))
        assert len(output) <= most
        text = text_of(state, output)
        assert judged(case, text), (seed, case.kind, case.spec, text)


def test_no_text_stays_open(compiler: Compiler) -> None:
    close_random_texts(compiler, QUICK)
