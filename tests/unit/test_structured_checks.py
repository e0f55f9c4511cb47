"""What a check says of a canvas, case by case, and what a step makes of it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import handmade
import numpy as np
import pytest
import torch
from grammar_loop import EOS, Compiler, ask

from dllm_plugin.decoding.block_causal import plan_block_diffusion, plan_d2f
from dllm_plugin.engine.grammars.backends import MANY
from dllm_plugin.grammar import closings
from dllm_plugin.grammar.closings import Limits, closes
from dllm_plugin.grammar.matchers import GuidanceMatcher, XgrammarMatcher
from dllm_plugin.grammar.state import DeadEnd, GrammarCheck, GrammarState
from dllm_plugin.grammar.step import (
    Checks,
    constrain,
    pack_checks,
    take_frontier,
    unpack,
)
from dllm_plugin.grammar.vocabulary import Vocabulary, holds, pack

# vLLM gives xgrammar an argument that it no longer reads.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
MASK = handmade.MASK
GAP = -1


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def compiler(request: pytest.FixtureRequest, single_rank: None) -> Iterator[Compiler]:
    compiler = Compiler(request.param)
    yield compiler
    compiler.close()


def state_of(
    compiler: Compiler, pattern: str, max_tokens: int, **options: Any
) -> GrammarState:
    return compiler.compile("regex", pattern, ask(max_tokens, **options)).state


def ids(state: GrammarState, text: str) -> list[int]:
    """One id per character, a blank for a gap, "$" for EOS."""
    special = {" ": GAP, "$": EOS}
    return [special.get(c, state.vocabulary.by_bytes.get(c.encode(), 0)) for c in text]


def shown(state: GrammarState, check: GrammarCheck) -> tuple[str, str, bool]:
    def spelled(tokens: list[int]) -> str:
        body = [i for i in tokens if i != EOS]
        return state.vocabulary.text(body).decode() + "$" * (len(tokens) - len(body))

    return spelled(check.settled), spelled(check.forced), check.rejected


# pattern, max_tokens, canvas -> settled, forced, rejected
TABLE = [
    ("[a-c]{4}", 9, "ab a", ("ab", "", False)),  # what stands behind a gap waits
    ("[a-c]{4}", 9, "abx ", ("ab", "", True)),  # a refused draft
    ("[a-c]{4}", 9, "abca", ("abca", "$", False)),  # nothing else may follow
    ("[a-c]{4}", 9, "ab$a", ("ab", "", True)),  # the end comes too early
    ("[a-c]{1,4}", 9, "ab$a", ("ab$", "", False)),  # the end, whatever stands behind it
    ("[a-c]+d", 3, "ab  ", ("ab", "d", False)),  # the budget is used up by the closing
    ("[a-c]+d", 3, "abc ", ("ab", "d", True)),  # that choice leaves no room
    ("[a-c]*", 2, "ab  ", ("ab", "", False)),  # the budget is spent
    ("ab|ac", 9, "  b ", ("", "", False)),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
def test_checks(
    row: tuple[str, int, str, tuple[str, str, bool]], compiler: Compiler
) -> None:
    pattern, most, canvas, wanted = row
    state = state_of(compiler, pattern, most)
    for _ in range(2):  # a check leaves the state where it was
        assert shown(state, state.check(ids(state, canvas))) == wanted


def test_a_lost_canvas_is_told_by_its_ids(compiler: Compiler) -> None:
    """A request that was preempted may begin again: what was settled still has its closing."""
    state = state_of(compiler, "[a-c]+d", 6)
    assert shown(state, state.check(ids(state, "abc   ")))[0] == "abc"
    assert shown(state, state.check([]))[0] == ""
    assert shown(state, state.check(ids(state, "cc    ")))[0] == "cc"
    assert state.commit(ids(state, "cc")) and state.left == 4
    assert shown(state, state.check(ids(state, "abc "))) == ("abc", "d", False)


def test_a_choice_that_leaves_no_room_is_replaced(compiler: Compiler) -> None:
    """Also where the refusal is seen a step before its place can be decided again."""
    state = state_of(compiler, "[a-c]{2}d|[a-c]e{9}", 4)
    first = state.check([])
    assert first.allowed is not None and not first.forced
    state.check(ids(state, "a   "))
    for canvas in ("ae  ", "a   "):
        check = state.check(ids(state, canvas))
        assert shown(state, check)[:2][0] == "a" and len(check.forced) == 1
    assert state.num_refused == 1


def test_text_that_must_follow(compiler: Compiler) -> None:
    """It is written, less its last id; a request with log-probabilities chooses it instead."""
    pattern = "ja, certainly|nein"
    state = state_of(compiler, pattern, 30)
    settled, forced, _ = shown(state, state.check(ids(state, "j")))
    assert settled == "j" and "a, certainly".startswith(forced) and len(forced) > 3
    chooses = state_of(compiler, pattern, 30, logprobs=1)
    check = chooses.check(ids(chooses, "j"))
    assert not check.forced and check.allowed is not None
    assert (
        state_of(compiler, pattern, 3).check([]).forced == []
    )  # too long: no closing is known


def test_special_ids_never_stand_in_a_text(compiler: Compiler) -> None:
    state = state_of(compiler, '"[^"]*"', 30)
    check = state.check(ids(state, '"'))
    allowed = np.unpackbits(check.allowed.view(np.uint8), bitorder="little")  # type: ignore[union-attr]
    assert not allowed[484:490].any() and allowed.sum() > 200


def test_no_text_at_all(compiler: Compiler) -> None:
    state = state_of(compiler, "[a-c]{3}", 2)
    assert not state.completes  # and what it gets is the beginning of one
    assert shown(state, state.check(ids(state, "ab")))[0] == "ab"
    with pytest.raises((DeadEnd, ValueError, RuntimeError)):
        compiler.compile("grammar", "root ::= root", ask(9))


CODE = {"type": "string", "pattern": "^[A-Z]{3}[0-9]+x$"}
AT = {"type": "string", "format": "time"}
MAIL = {"type": "string", "format": "email"}
DATE = {"type": "string", "format": "date"}


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    fixed = {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
    }
    return fixed | {"properties": properties}


@pytest.mark.parametrize(
    "schema",
    [
        _closed({name: CODE for name in "abcd"}),
        {"type": "array", "items": _closed({"at": AT, "who": MAIL}), "minItems": 2},
        _closed(
            {"count": {"type": "integer", "minimum": 0, "maximum": 150}, "who": MAIL}
        ),
    ],
)
def test_closings_without_an_automaton(
    compiler: Compiler, schema: dict[str, Any]
) -> None:
    """What may be repeated is left again, and fields that look alike are told apart."""
    state = compiler.compile("json", schema, ask(150)).state
    assert (
        state.guide is None and state.completes and closes(state.matcher, state.witness)
    )


ALL_OF = {"allOf": [_closed({"a": AT}), {"type": "object", "required": ["a"]}]}


def test_requests_have_backends_of_their_own(compiler: Compiler) -> None:
    """vLLM compiles by the backend of its first request whatever another one names."""
    kinds = {"xgrammar": XgrammarMatcher, "guidance": GuidanceMatcher}
    state_of(compiler, "[a-c]{4}", 9)
    for name, kind in kinds.items():
        state = compiler.compile("json", _closed({"a": AT}), ask(80), name).state
        assert isinstance(state.matcher, kind) and state.completes
    # What xgrammar ignores is guidance's as well.
    for schema in (
        ALL_OF | {"type": "object"},
        {"type": "string", "pattern": "^a+$", "enum": ["aa"]},
        DATE,
    ):
        state = compiler.compile("json", schema, ask(80), "xgrammar").state
        assert isinstance(state.matcher, GuidanceMatcher) and state.completes
    # What it refuses, xgrammar reads, if but for dates that no month has.
    other = {"type": "string", "format": "uri-template"}
    state = compiler.compile(
        "json", _closed({"a": DATE, "b": other}), ask(80), "xgrammar"
    ).state
    assert isinstance(state.matcher, XgrammarMatcher) and state.completes
    with pytest.raises(ValueError, match="if"):
        compiler.compile(
            "json", {"type": "object", "if": {"required": ["a"]}}, ask(80), "xgrammar"
        )


WORDS = [f"word {i} of many" for i in range(MANY + 1)]
WIDE: dict[str, tuple[str, Any]] = {
    "choice": ("choice", WORDS),
    "values": ("json", _closed({"a": {"enum": WORDS}})),
    "constants": ("json", {"anyOf": [{"const": word} for word in WORDS]}),
    "expression": ("regex", "|".join(WORDS)),
}


@pytest.mark.parametrize("compiler", ["xgrammar"], indirect=True)
@pytest.mark.parametrize("name", WIDE)
def test_many_alternatives_go_to_guidance(compiler: Compiler, name: str) -> None:
    """10,000 of them take xgrammar 10 s."""
    state = compiler.compile(*WIDE[name], ask(80)).state
    assert isinstance(state.matcher, GuidanceMatcher) and state.completes
    text = f'{{"a":"{WORDS[7]}"}}' if name == "values" else WORDS[7]
    text = f'"{text}"' if name == "constants" else text
    canvas = [state.vocabulary.by_bytes[c.encode()] for c in text]
    assert state.check(canvas).settled[: len(canvas)] == canvas


@pytest.mark.parametrize("compiler", ["xgrammar"], indirect=True)
def test_fewer_alternatives_stay_with_xgrammar(compiler: Compiler) -> None:
    state = compiler.compile("choice", WORDS[:MANY], ask(80)).state
    assert isinstance(state.matcher, XgrammarMatcher)


def test_a_search_waits_for_the_lock_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What other threads take of the processor counts less than this thread's own time."""
    now = {"thread_time": 5.0, "monotonic": 50.0}
    monkeypatch.setattr(
        closings, "time", SimpleNamespace(**{k: lambda k=k: now[k] for k in now})
    )
    limits = Limits.within(9, 2.0, 3.0)
    assert limits == Limits(9, 7.0, 56.0)
    for name, passed, over in (("monotonic", 55.0, False), ("monotonic", 57.0, True)):
        now[name] = passed
        assert limits.over() is over
    now |= {"thread_time": 7.5, "monotonic": 52.0}
    assert limits.over()


def test_bytes_within_a_character(compiler: Compiler) -> None:
    """A draft may end inside of a character: its closing begins there."""
    state = state_of(compiler, "[é-ü]x", 4)
    first = state.vocabulary.by_bytes["é".encode()[:1]]
    check = state.check([first, GAP, GAP, GAP])
    assert check.settled == [first] and state.completes


def test_half_a_surrogate_pair_is_no_character(compiler: Compiler) -> None:
    """UTF-8 has no such bytes: readers would count three characters. Hangul begins alike."""
    state = compiler.compile("json", {"type": "string", "maxLength": 2}, ask(20)).state
    matcher, of = state.matcher, state.vocabulary.by_bytes
    high, low, next_byte = of[b"\xed"], of[b"\x95"], of[b"\x9c"]
    assert matcher.accept(of[b'"']) and matcher.accept(high)
    allowed = matcher.allowed().copy()
    assert holds(allowed, np.array([low, of[b"\xa0"], of[b"\xbf"]])).tolist() == [
        True,
        False,
        False,
    ]
    assert not matcher.accept(of[b"\xa0"]) and not matcher.fork().accept(of[b"\xbf"])
    assert (
        matcher.accept(low)
        and matcher.accept(next_byte)
        and matcher.fork().accept(of[b'"'])
    )
    matcher.rollback(2)
    assert not matcher.accept(of[b"\xa0"])
    matcher.rollback(1)
    assert matcher.accept(of[b"a"])


def test_vocabulary() -> None:
    pieces = [b"a", b"b", b"ab", b"", b"\xc3", b"abc", b"\xed\xa0", b"\xed\x9f"]
    known = Vocabulary(pieces, {5}, lambda text: [2] if text == "ab" else [], ())
    assert known.encode(b"ab") == [2] and known.encode(b"ba") == [] == known.encode(
        b"\xc3"
    )
    assert known.cut(b"abab\xc3") == [2, 2, 4] and known.cut(b"az") == []
    assert known.cut(b"ab", longest=1) == [0, 1]
    assert known.never.tolist() == [False, False, False, True, False, True, True, False]
    row = pack(np.array([False, True, False, True]), 2)
    assert row.dtype == np.int32
    assert holds(row, np.array([0, 1, 3])).tolist() == [False, True, True]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 97])
def test_bits(size: int) -> None:
    flags = np.random.default_rng(size).random((3, size)) < 0.5
    packed = np.stack([pack(row, -(-size // 32)) for row in flags])
    assert (unpack(torch.from_numpy(packed), size).numpy() == flags).all()


def checks_of(check: GrammarCheck, writes: bool = True) -> Checks:
    """A check of the only request of a step."""
    payload = pack_checks(["a"], [check], [writes], 1)
    numbers = torch.from_numpy(payload.numbers_GN).unbind(1)
    flags = [column > 0 for column in numbers[2:]]
    known, allowed = map(torch.from_numpy, (payload.known_GK, payload.allowed_GW))
    return Checks(
        torch.zeros(1, dtype=torch.int64), known, *numbers[:2], *flags, allowed
    )


def step(
    tokens: list[int], check: GrammarCheck, strategy: Any = plan_d2f, **fields: Any
) -> Any:
    """Tokens, candidates, stored blocks, open blocks and what is taken if the policy takes all."""
    canvas = handmade.canvas(1, len(tokens), 4, False, [tokens], **fields)
    plan = strategy(canvas, MASK)
    rows = torch.ones_like(canvas.tokens_RC, dtype=torch.bool)
    canvas, plan, constraint = constrain(canvas, plan, rows, checks_of(check), MASK)
    taken = take_frontier(constraint, plan, plan.candidates_RC)
    least = take_frontier(constraint, plan, torch.zeros_like(taken))
    return (
        canvas.tokens_RC[0].tolist(),
        plan.candidates_RC[0].nonzero().flatten().tolist(),
        int(plan.num_stored_R),
        int(plan.open_R),
        taken[0].nonzero().flatten().tolist(),
        least[0].nonzero().flatten().tolist(),
    )


ANY = np.array([-1], dtype=np.int32)


def test_settled_blocks_are_stored() -> None:
    tokens = [1, 2, 3, 4, MASK, 6, MASK, MASK]
    got = step(tokens, GrammarCheck([1, 2, 3, 4], [], ANY, False, False))
    assert got == (tokens, [4, 6, 7], 1, 2, [4, 6, 7], [4])


def test_a_refused_draft_drops_what_follows_it() -> None:
    tokens = [1, 2, 3, 4, MASK, 6, MASK, MASK]
    got = step(tokens, GrammarCheck([1, 2], [], ANY, True, True))
    assert got == ([1, 2, *[MASK] * 6], [2], 0, 2, [2], [2])


def test_one_active_block_waits_for_the_one_before() -> None:
    tokens = [1, 2, 3, 4, *[MASK] * 4]
    fields = {"max_active_R": [1.0], "open_R": [1]}
    got = step(
        tokens,
        GrammarCheck([1, 2], [], ANY, True, True),
        plan_block_diffusion,
        **fields,
    )
    assert got == ([1, 2, *[MASK] * 6], [2], 0, 1, [2], [2])
    settled = GrammarCheck([1, 2, 3, 4], [], ANY, False, False)
    got = step(tokens, settled, plan_block_diffusion, **fields)
    assert got == (tokens, [4, 5, 6, 7], 1, 2, [4, 5, 6, 7], [4])


def test_forced_ids_are_written() -> None:
    """They are final, but their block is stored once it was computed with them."""
    tokens = [1, MASK, MASK, 9, *[MASK] * 4]
    got = step(tokens, GrammarCheck([1], [5, 6], ANY, False, False))
    # The draft at the frontier has not been checked yet.
    assert got == ([1, 5, 6, 9, *[MASK] * 4], [4, 5, 6, 7], 0, 2, [4, 5, 6, 7], [])
    conflict = step(tokens, GrammarCheck([1], [5, 6, 7], ANY, False, False))
    assert conflict[0] == [1, 5, 6, 7, *[MASK] * 4] and conflict[4] == [4]


def test_a_canvas_that_was_lost_is_written_again() -> None:
    got = step([MASK] * 8, GrammarCheck([1, 2, 3, 4, 5], [], ANY, False, False))
    assert got[0] == [1, 2, 3, 4, 5, MASK, MASK, MASK] and got[2] == 0


def test_the_tail_of_a_prompt_is_no_text() -> None:
    tokens = [8, 8, 1, MASK, MASK, MASK, MASK, MASK]
    got = step(tokens, GrammarCheck([1], [], ANY, False, False), tail_R=[2])
    assert got[0] == tokens and got[5] == [3]
