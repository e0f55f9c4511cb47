"""Token automata: what they are built of, what they take, and what is too large for one."""

import itertools
import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from grammar_cases import SCHEMAS, regex_case, schema_case
from refusals import resolved
from scripted import sampling
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.utils import choice_as_grammar

from dllm_plugin.config.decode import Case, DecodeConfig
from dllm_plugin.config.request.exclusions import refuse_parameters
from dllm_plugin.config.request.parsing import given_arguments, request_arguments
from dllm_plugin.grammar import automaton as module
from dllm_plugin.grammar.automaton import (
    END,
    START,
    Guide,
    TokenAutomaton,
    TooLarge,
    build,
)
from dllm_plugin.grammar.schemas import expression
from dllm_plugin.grammar.vocabulary import Vocabulary
from dllm_plugin.sampling.features.automaton_tables import AutomatonTables

SPECIAL, EOS = 256, 257
LONGER = ["an", "ab", "abc", '", "', '":', "tr", "ue", "}\n", "0123", "日", "é"]
PIECES = [bytes([byte]) for byte in range(256)] + [b"<s>", b"</s>"]
PIECES += [piece.encode() for piece in LONGER]
IRREGULAR = (
    *(
        "pattern",
        "format",
        "range",
        "one_of",
        "recursive",
        "extra",
        "address",
        "quoted",
        "narrowed",
    ),
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(PIECES, [SPECIAL, EOS], lambda text: list(text.encode()))


def of_regex(vocabulary: Vocabulary, pattern: str) -> TokenAutomaton:
    return build({"pattern": pattern}, vocabulary, [EOS])


def takes(automaton: TokenAutomaton, ids: list[int]) -> bool:
    """Whether ids are a whole text, its stop token included."""
    return bool(ids) and Guide("", automaton).follow(START, ids)[-1] == END


def walk(automaton: TokenAutomaton, rng: random.Random) -> list[int]:
    """A random text, which after a while goes the shortest way to its end."""
    state, ids = START, []
    while state != END:
        edges = np.flatnonzero(automaton.source_E == state)
        if len(ids) > 30:
            edges = edges[
                automaton.far_Q[automaton.target_E[edges]].argsort(kind="stable")
            ][:1]
        edge = rng.choice(edges.tolist())
        low, high = automaton.bound_K1[automaton.class_E[edge] :][:2].tolist()
        ids.append(int(automaton.order_V[rng.randrange(low, high)]))
        state = int(automaton.target_E[edge])
    return ids


@pytest.mark.parametrize("seed", range(6))
def test_texts_are_those_of_the_expression(seed: int, vocabulary: Vocabulary) -> None:
    rng = random.Random(seed)
    case = regex_case(rng)
    automaton = of_regex(vocabulary, case.spec)
    for _ in range(20):
        ids = walk(automaton, rng)
        assert case.judge(vocabulary.text(ids[:-1]).decode()), case.spec
        assert takes(automaton, ids) and not takes(automaton, ids[:-1])
        other = [rng.choice([97, 48, 258, *ids]) for _ in range(rng.randint(0, 6))]
        text = vocabulary.text(other).decode("utf-8", "replace")
        valid = re.fullmatch(case.spec, text) is not None and EOS not in other
        assert takes(automaton, [*other, EOS]) == valid, (case.spec, other)


def test_what_comes_first_leaves_nothing_out(vocabulary: Vocabulary) -> None:
    """Expressions elsewhere take the first alternative, and as little as a lazy one needs."""
    for pattern, texts in {
        "|a": ["", "a"],
        "a|ab": ["a", "ab"],
        "(?:a|ab)(?:c|bcd)?": ["a", "ab", "ac", "abc", "abcd", "abbcd"],
        "a??b*?": ["", "a", "b", "abb"],
    }.items():
        automaton = of_regex(vocabulary, pattern)
        for text in texts:
            assert takes(automaton, [*text.encode(), EOS]), (pattern, text)


def test_every_cut_of_a_text_is_taken(vocabulary: Vocabulary) -> None:
    """Also those within a character; special ids are not, whatever they spell."""
    automaton = of_regex(vocabulary, "(?:abc|日|<s>)+")
    for ids in (
        [97, 98, 99],
        [259, 99],
        [260],
        [267],
        list("日".encode()),
        [97, 98, 99, 267],
    ):
        assert takes(automaton, [*ids, EOS]), ids
    assert takes(automaton, [*b"<s>", EOS]) and not takes(automaton, [SPECIAL, EOS])


def test_states_know_how_far_they_are(vocabulary: Vocabulary) -> None:
    """By trying all short texts of a few ids."""
    automaton = of_regex(vocabulary, "(?:ab|b){2}c?")
    ids = [97, 98, 99, 259, 260]
    shortest = min(
        count
        for count in range(6)
        for text in itertools.product(ids, repeat=count)
        if takes(automaton, [*text, EOS])
    )
    assert automaton.far_Q[START] == shortest == 2
    assert automaton.far_Q[END] == 0


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_schemas(name: str, vocabulary: Vocabulary) -> None:
    """Texts of those that are regular are valid; the others have no automaton."""
    asked = expression("json", json.dumps(SCHEMAS[name]))
    assert (asked is None) == (name in IRREGULAR)
    if asked is None:
        return
    automaton, rng, case = (
        build(asked, vocabulary, [EOS]),
        random.Random(name),
        schema_case(name),
    )
    for _ in range(10):
        assert case.judge(vocabulary.text(walk(automaton, rng)[:-1]).decode()), name


ODD = [
    "a.b",
    "a",
    "up",
    "upper",
    "(",
    "",
    "two words",
    "日本",
    'quo"te',
    "back\\slash",
    "line\nbreak",
    "\x01",
    "*",
]


@pytest.mark.parametrize("kind", ["choice", "grammar"])
def test_words(kind: str, vocabulary: Vocabulary) -> None:
    spec = json.dumps(ODD) if kind == "choice" else choice_as_grammar(ODD)
    asked = expression(kind, spec)
    assert asked is not None
    automaton = build(asked, vocabulary, [EOS])
    for word in ODD:
        assert takes(automaton, [*word.encode(), EOS]), word
    assert not takes(automaton, [*b"a-b", EOS])


def test_a_property_may_have_any_plain_name(vocabulary: Vocabulary) -> None:
    names = ["a.b", "$", "(x", "größe", "two words"]
    properties = {name: {"enum": ["+", "[1]", 7, True, None]} for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    asked = expression("json", json.dumps(schema))
    assert asked is not None
    automaton, rng = build(asked, vocabulary, [EOS]), random.Random(0)
    for _ in range(10):
        found = json.loads(vocabulary.text(walk(automaton, rng)[:-1]))
        assert list(found) == names and set(found.values()) <= {
            "+",
            "[1]",
            7,
            True,
            None,
        }


@pytest.mark.parametrize(
    "kind,spec",
    [
        ("grammar", 'root ::= "a" root'),
        ("json_object", ""),
        ("structural_tag", "{}"),
        ("json", '{"type": "string", "pattern": "a"}'),
        ("json", '{"type": "integer", "minimum": 3}'),
        ("json", '{"type": ["string", "null"]}'),
        ("json", '{"type": "object"}'),
        ("json", '{"type": "array"}'),
        ("json", '{"type": "object", "properties": {"a\\"b": {"type": "null"}}}'),
        ("json", '{"type": "object", "properties": {}, "required": ["a"]}'),
        ("json", "true"),
        ("json", "{"),
    ],
)
def test_what_is_not_regular(kind: str, spec: str) -> None:
    assert expression(kind, spec) is None


def test_limits(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends in a sentence, also where making states would never end."""
    monkeypatch.setattr(module, "BYTE_SECONDS", 1.0)
    never = [
        "a{1000}{1000}",
        "(a|b)*a(a|b){25}",
        "[",
        "|".join(f"{i} words" for i in range(9000)),
    ]
    for pattern in (*never, "[^\\x00-\\x{10FFFF}]"):
        with pytest.raises(TooLarge):
            of_regex(vocabulary, pattern)
    for name, pattern in (
        ("MAX_STATES", "a{9}"),
        ("MAX_CLASSES", "abcdef"),
        ("MAX_EDGES", "a{9}"),
    ):
        with (
            monkeypatch.context() as patched,
            pytest.raises(TooLarge, match=r"more|at most"),
        ):
            patched.setattr(module, name, 5)
            of_regex(vocabulary, pattern)
    monkeypatch.setattr(module, "SECONDS", 0.0)
    with pytest.raises(TooLarge, match="building takes more"):
        of_regex(vocabulary, "[a-z]{9}")


def test_tables_hold_each_automaton_once(vocabulary: Vocabulary) -> None:
    small, large = of_regex(vocabulary, "ab"), of_regex(vocabulary, "[a-f]{9}x|y+")
    held = AutomatonTables(torch.device("cpu"))
    places = [held.add("s", small), held.add("l", large), held.add("s", small)]
    assert places[0] == places[2] != places[1]

    def check(place: int, automaton: TokenAutomaton) -> None:
        tables = held.tables
        assert tables is not None
        states, classes, edges = automaton.sizes
        for table, array in zip(tables, automaton, strict=True):
            assert table[place, : len(array)].tolist() == array.tolist()
        assert (tables.class_AE[place, edges:] == 0).all()
        assert (tables.first_AQ[place, states:] == edges).all()
        assert (tables.bound_AK[place, classes:] == len(PIECES)).all()
        assert (tables.far_AQ[place, states:] == module.FAR).all()

    check(places[0], small)
    check(places[1], large)
    held.release(places[0])
    assert held.add("s", small) == places[0]
    held.release(places[0])
    held.release(places[0])
    assert held.add("again", large) == places[0]
    check(places[0], large)


def test_tables_shrink(vocabulary: Vocabulary) -> None:
    """Once nobody uses a large automaton: steps compute all that tables have room for."""
    held = AutomatonTables(torch.device("cpu"))
    small = of_regex(vocabulary, "ab")
    first, large = (
        held.add("s", small),
        held.add("l", of_regex(vocabulary, "[a-f]{90}x")),
    )
    tables = held.tables
    held.add("t", small)
    assert held.tables is not None and tables is not None
    assert held.tables.far_AQ.shape[1] == tables.far_AQ.shape[1] > 4 * small.sizes[0]
    held.release(large)
    again = held.add("u", of_regex(vocabulary, "xy"))
    assert again == large and held.tables.far_AQ.shape[1] < 2 * small.sizes[0]
    assert held.tables.far_AQ[first, : small.sizes[0]].tolist() == small.far_Q.tolist()


def wish(kind: str = "regex", spec: Any = "a+", **options: Any) -> Any:
    params = sampling(9, **options)
    params.structured_outputs = StructuredOutputsParams(**{kind: spec})
    return params


def check(params: Any, config: DecodeConfig) -> None:
    given = params.extra_args
    asked = request_arguments(config, given, params.max_tokens)
    refuse_parameters(Case(config, asked, given_arguments(given), params))


def test_requests_are_refused_by_name() -> None:
    config = resolved(strategy="d2f")
    check(wish(dllm_grammar="automaton"), config)
    check(wish("json_object", True, dllm_grammar="auto"), config)
    refused = [
        (
            wish(dllm_grammar="fast"),
            "dllm_grammar 'fast' is unknown; choose one of: auto, drafts, automaton",
        ),
        (sampling(9, dllm_grammar="auto"), "has no effect without structured_outputs"),
        (
            wish("json_object", True, dllm_grammar="automaton"),
            "nothing else is regular",
        ),
        (wish(dllm_grammar="automaton", temperature=1.0, top_p=0.5), "top_p 0.5"),
        (wish(dllm_grammar="automaton", temperature=1.0, min_p=0.5), "min_p 0.5"),
        (wish(dllm_grammar="automaton", temperature=1.0, top_k=5), "top_k 5"),
    ]
    for params, sentence in refused:
        with pytest.raises(ValueError, match=sentence) as caught:
            check(params, config)
        assert str(caught.value).count("\n") == 0 and str(caught.value).endswith(".")
    engines: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"strategy": "d2f", "vocab_parallel": True}, {}, "vocab_parallel"),
        (
            {"strategy": "semi_autoregressive"},
            {"dllm_logits_eos_inf": True},
            "logits_eos_inf",
        ),
    ]
    for options, asked, name in engines:
        with pytest.raises(ValueError, match=name):
            check(wish(dllm_grammar="automaton", **asked), resolved(**options))
    dream = resolved("DreamModel", strategy="semi_autoregressive")
    with pytest.raises(ValueError, match="dllm_top_p"):
        check(wish(dllm_grammar="automaton", dllm_top_p=0.5), dream)
