"""Closings by automata: the shortest ones, the same texts as by searches, and no search."""

import random
from collections.abc import Iterator

import pytest
from grammar_cases import Case, choice_case, regex_case, schema_case
from grammar_loop import Compiler, GrammarLoop, Wants, ask, judged, random_text, text_of

from dllm_plugin.grammar.automaton import DEAD, START
from dllm_plugin.grammar.closings import closes, go
from dllm_plugin.grammar.state import GrammarState

# vLLM gives xgrammar an argument that it no longer reads.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
SCHEMAS = ("answer", "nested", "any_of", "calls")
IRREGULAR = Case(
    "grammar", 'root ::= "a" root | "b"', lambda text: set(text[:-1]) <= {"a"}
)


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def compiler(request: pytest.FixtureRequest, single_rank: None) -> Iterator[Compiler]:
    compiler = Compiler(request.param)
    yield compiler
    compiler.close()


def cases() -> list[Case]:
    rng = random.Random(8)
    return [
        *map(schema_case, SCHEMAS),
        *(regex_case(rng) for _ in range(4)),
        choice_case(rng),
    ]


def guided(compiler: Compiler, case: Case, most: int) -> GrammarState:
    state = compiler.compile(case.kind, case.spec, ask(most)).state
    assert state.guide is not None, case.spec
    return state


def test_closings_are_the_shortest(compiler: Compiler) -> None:
    """Behind every beginning of random texts, by the backend's own grammar."""
    for case in cases():
        state, rng = guided(compiler, case, 100), random.Random(1)
        ids = [i for i in random_text(state, rng, 30) if i not in state.stops]
        for count, place in enumerate(state.guide.follow(START, ids)):
            assert go(state.matcher, ids[: count + 1])
            if place != DEAD:
                found = state.guide.closing(place)
                assert len(found) == state.guide.distance(place)
                assert closes(state.matcher, found), (
                    case.spec,
                    ids[: count + 1],
                    found,
                )
                # One id fewer does not do: no id leads nearer than by one.
                for token in found[:1]:
                    behind = state.guide.follow(place, [token])[0]
                    assert state.guide.distance(behind) == len(found) - 1
            state.matcher.rollback(count + 1)


def test_the_budget_of_the_shortest_text_suffices(compiler: Compiler) -> None:
    for case in cases():
        least = guided(compiler, case, 100).guide.distance(START)
        assert guided(compiler, case, max(least, 1)).completes
        assert least < 2 or not guided(compiler, case, least - 1).completes


@pytest.mark.parametrize("seed", range(3))
def test_texts_are_those_of_searched_closings(compiler: Compiler, seed: int) -> None:
    """Drafts with faults, in a budget that does not press: only one of both ways searches.

    JSON is left out: backends take line breaks and escapes that no automaton of ours knows.
    """
    searches = 0
    for number, case in enumerate(case for case in cases() if case.kind != "json"):
        texts = []
        for has_guide in (True, False):
            loop = GrammarLoop(
                {"strategy": "d2f", "block_length": 8, "canvas_length": 32}
            )
            params, rng = ask(150, dllm_threshold=0.5), random.Random(number)
            grammar = compiler.compile(case.kind, case.spec, params)
            state = grammar.state
            if not has_guide:
                state.guide, state._place = None, DEAD
            wants = Wants(seed, random_text(state, rng, 60), 0.1)
            run = loop.begin(wants, params, grammar)
            loop.run(limit=700)
            texts.append(text_of(state, run.output))
            assert judged(case, texts[-1]), (case.spec, texts[-1])
            assert not (has_guide and state.searches), case.spec
            searches += state.searches
        assert texts[0] == texts[1], case.spec
    assert searches > 0, "without a guide"


def test_others_have_none(compiler: Compiler) -> None:
    state = compiler.compile(IRREGULAR.kind, IRREGULAR.spec, ask(9)).state
    assert state.guide is None and state.completes
