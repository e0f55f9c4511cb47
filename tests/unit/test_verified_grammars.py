"""Grammars where drafts are verified: texts are those of causal decoding."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from grammar_cases import SCHEMAS, Case, choice_case, regex_case, schema_case
from grammar_loop import EOS, VOCAB, Compiler, ask, judged, text_of

from dllm_plugin.grammar.state import DeadEnd, GrammarState
from dllm_plugin.grammar.step import NO_ID
from dllm_plugin.grammar.verified import VerifiedState

pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
BUDGETS = (1, 2, 5, 9, 16, 40)
NAMES = ("answer", "flat", "any_of", "recursive", "short_text", "extra")


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def compiler(request: pytest.FixtureRequest, single_rank: None) -> Iterator[Compiler]:
    compiler = Compiler(request.param)
    yield compiler
    compiler.close()


def verified(state: GrammarState, left: int) -> VerifiedState:
    """The same grammar at its start, for causal forwards."""
    parts: dict[str, Any] = {"guide": state.guide, "chart": state.chart}
    matcher = state.matcher.fork()
    made = VerifiedState(matcher, state.vocabulary, state.stops, left, **parts)
    made.find_closing()
    return made


def choose(seed: int, text: list[int], bits: np.ndarray | None) -> int:
    """The best allowed id after a text, by random logits that depend on the text alone."""
    rng = np.random.default_rng([seed, *text])
    row = rng.standard_normal(VOCAB).astype(np.float32)
    row[EOS] += 1.0
    if bits is not None:
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB]
        row[allowed == 0] = -np.inf
    return int(row.argmax())


def decode(state: VerifiedState, seed: int, stride: int) -> tuple[list[int], int]:
    """Decode as strides do, with drafts that are often right; return ids and forwards."""
    rng = random.Random(seed)
    [row] = state.check([]).rows
    text, pending, forwards = list[int](), choose(seed, [], row), 0
    while True:
        forwards += 1
        canvas = [pending]
        while len(canvas) < stride:
            wild = rng.random() < 0.2
            bits = None if wild or state.ended else peek(state, canvas)
            canvas.append(choose(seed, text + canvas, bits))
        check = state.check([*canvas, -1])
        if not check.settled:
            assert check.forced != NO_ID and state.commit([])
            pending = check.forced
            continue
        kept, rows = 1, iter(check.rows)
        while pending != EOS and len(text) + kept < state.left + len(text):
            row = next(rows, None)
            assert row is not None
            pending = choose(seed, text + canvas[:kept], row)
            if kept >= check.settled or canvas[kept] != pending:
                break
            kept += 1
        emitted = canvas[:kept]
        is_last = pending == EOS or state.left == kept + 1
        if EOS not in emitted and state.left > kept and is_last:
            emitted.append(pending)
        text += emitted
        assert state.commit(emitted)
        if state.ended or not state.left:
            return text, forwards


def peek(state: VerifiedState, canvas: list[int]) -> np.ndarray | None:
    """What the grammar allows after a canvas; None if it refuses the canvas."""
    fork = state.matcher.fork()
    for token in canvas:
        if token >= VOCAB or token == EOS or not fork.accept(token):
            return None
    bits = fork.allowed().copy()
    return bits if bits.any() else None


def cases() -> list[Case]:
    rng = random.Random(4)
    regular = [regex_case(rng) for _ in range(6)] + [choice_case(rng)]
    assert set(NAMES) <= set(SCHEMAS)
    return [*map(schema_case, NAMES), *regular]


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case.spec)[:24])
def test_texts_do_not_depend_on_drafts(case: Case, compiler: Compiler) -> None:
    """Valid at any budget, and complete if a closing was known at the start."""
    for seed, left in enumerate(BUDGETS):
        try:
            state = compiler.compile(case.kind, case.spec, ask(left)).state
            found = [decode(verified(state, left), seed, n) for n in (1, 2, 7)]
        except DeadEnd:
            continue
        texts = [ids for ids, _ in found]
        assert texts == texts[:1] * len(found), (left, texts)
        assert found[-1][1] <= found[0][1]
        if state.completes:
            assert judged(case, text_of(state, texts[0])), (left, texts[0])


def test_drafts_save_forwards(compiler: Compiler) -> None:
    case = schema_case("flat")
    state = compiler.compile(case.kind, case.spec, ask(40)).state
    counts = [decode(verified(state, 40), 3, stride)[1] for stride in (1, 7)]
    assert counts[1] < counts[0] / 2


def test_a_text_that_the_grammar_refuses_is_no_commit(compiler: Compiler) -> None:
    state = compiler.compile("regex", "[a-c]{3}", ask(9)).state
    one = verified(state, 9)
    [row] = one.check([]).rows
    first = choose(0, [], row)
    assert one.check([first, -1]).settled == 1
    assert not one.commit([first, EOS])
