"""Structured output on real engines: valid, complete where the budget allows, and harmless."""

import json
import random
import re
import time
from collections import Counter
from typing import Any

import pytest
from engines import (
    EngineRoom,
    free_pages,
    generate,
    letters,
    num_preemptions,
    params,
    scheduler,
    token_ids,
)
from grammar_cases import SCHEMAS, Case, regex_case, schema_case
from grammar_requests import WAYS, cases, wish
from hostile_grammars import COMPILED, HOSTILE
from test_full_compiled import sampler_of

from dllm_plugin.sampling.features.automata import Automata

pytestmark = pytest.mark.slow


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches end by their counts: how far one gets in seconds depends on what else runs here."""
    for name in ("FIRST_SECONDS", "STEP_SECONDS", "REQUEST_SECONDS"):
        monkeypatch.setattr(f"dllm_plugin.grammar.state.{name}", 60.0)


def test_nobody_asks_nobody_pays(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request without a grammar calls nothing of this, and its results travel as before."""
    from dllm_plugin.engine.grammars import grammars
    from dllm_plugin.engine.scheduling import grammar_scheduler
    from dllm_plugin.engine.worker import worker
    from dllm_plugin.grammar import step
    from dllm_plugin.sampling.features import automata
    from dllm_plugin.sampling.features import grammars as sampling

    calls: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    counted(worker, "AsyncCanvasOutput")
    counted(grammar_scheduler, "pack_checks")
    counted(grammars.Grammars, "prepare")
    counted(sampling.StagedChecks, "start_step")
    counted(sampling.StagedChecks, "write_prefilled")
    counted(sampling, "constrain")
    counted(step.Constraint, "__new__")
    counted(automata.Automata, "start")
    counted(automata.Automata, "_propose")
    for overlapped in (False, True):
        llm = room.start("llada", {"strategy": "d2f"}, async_scheduling=overlapped)
        generate(llm, [letters(9), letters(12)], params(40))
        assert not calls
    prompts, asked = [letters(9), letters(12)], ("regex", "[a-c]{9}", 20)
    generate(llm, prompts, [params(40), wish(*asked, dllm_grammar="automaton")])
    # An automaton is handed over once, and no canvas is checked.
    assert calls["start"] == 1 and calls["prepare"] and not calls["pack_checks"]
    assert not (calls["AsyncCanvasOutput"] or calls["start_step"])
    generate(llm, prompts, [params(40), wish(*asked, dllm_grammar="drafts")])
    assert all(calls[name] for name in ("AsyncCanvasOutput", "pack_checks", "prepare"))
    assert calls["start_step"] and calls["constrain"] and calls["write_prefilled"]
    assert calls["start"] == 1


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars(name: str, room: EngineRoom) -> None:
    """A refusal or a valid text, as listed, and neighbours as if nothing were there."""
    from vllm.exceptions import VLLMValidationError

    llm = room.start("llada", {"strategy": "d2f"})
    free = letters(9), params(40)
    [alone] = generate(llm, [free[0]], free[1])
    [(kind, spec)], expected = HOSTILE[name][0].items(), HOSTILE[name][1]
    began = (
        time.process_time()
    )  # of all threads; other processes may keep this one waiting
    engine, told = llm.llm_engine, ""
    engine.add_request("free", {"prompt_token_ids": free[0]}, free[1])
    try:
        prompt = {"prompt_token_ids": letters(5)}
        engine.add_request("hostile", prompt, wish(kind, spec, 40))
    except (ValueError, VLLMValidationError) as error:
        told = str(error).strip()
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        done |= {
            output.request_id: output for output in engine.step() if output.finished
        }
    assert time.process_time() - began < 10
    assert token_ids(done["free"]) == token_ids(alone)
    if not told:
        [completion] = done["hostile"].outputs
        told = completion.stop_reason if completion.finish_reason == "error" else ""
    if isinstance(expected, str):
        assert expected in told and "\n" not in told
        # What the compiler finds is known once the request runs.
        assert expected.startswith(COMPILED) == ("hostile" in done)
    else:
        assert not told and expected(completion.text), completion.text


@pytest.mark.parametrize("way", ["automaton", "drafts"])
def test_a_text_of_as_many_tokens_as_may_be(way: str, room: EngineRoom) -> None:
    """With the last token it is whole, with one more it stops, with one fewer it is a beginning."""
    llm = room.start("llada", {"strategy": "d2f"})
    text = "abcdefghijkl"
    found = {}
    for count in (len(text) - 1, len(text), len(text) + 1):
        asked = wish("regex", text, count, dllm_grammar=way)
        [completion] = generate(llm, [letters(5)], asked)[0].outputs
        assert len(completion.token_ids) == count
        found[count - len(text)] = completion.text, completion.finish_reason
    assert found == {-1: (text[:-1], "length"), 0: (text, "length"), 1: (text, "stop")}


@pytest.mark.parametrize(("checkpoint", "strategy", "overlapped"), WAYS)
def test_every_text_is_complete(
    checkpoint: str, strategy: str, overlapped: bool, room: EngineRoom
) -> None:
    """Mixed with free requests, whose tokens stay; greedy, sampled, and with log-probabilities."""
    dllm: dict[str, Any] = {"strategy": strategy.partition(",")[0]}
    if strategy.endswith("single blocks"):
        # As GPUs have it: steps of few requests take canvases.
        dllm["commit_alone_from"] = 5
    llm = room.start(checkpoint, dllm, async_scheduling=overlapped)
    free = [(letters(9 + i, i), params(24)) for i in range(2)]
    alone = [token_ids(output) for output in generate(llm, *zip(*free, strict=True))]
    pages = free_pages(llm)
    scored = {"logprobs": 2, "dllm_grammar": "drafts"}
    asked: list[tuple[Case, Any]] = []
    both = []
    # Each case greedily, and of the two other ways in this one or in the next.
    others = [{"temperature": 1.0, "seed": 5}, scored]
    others = others[WAYS.index((checkpoint, strategy, overlapped)) % 2 :] + others
    for turn in range(2):
        for i, case in enumerate(cases()):
            one = wish(case.kind, case.spec, 48, **(others[i % 2] if turn else {}))
            asked.append((case, one))
            both.append((letters(5 + i, i), one))
        both += free
    outputs = generate(llm, *map(list, zip(*both, strict=True)))
    backends = {one.structured_outputs._backend for _, one in asked}
    assert backends == {"xgrammar", "guidance"}
    held, unheld = [], []
    for (_, one), output in zip(both, outputs, strict=True):
        (held if one.structured_outputs else unheld).append(output)
    for (case, one), output in zip(asked, held, strict=True):
        [completion] = output.outputs
        assert len(completion.token_ids) <= 48
        assert case.judge(completion.text), (case.kind, case.spec, completion.text)
        for place, token in enumerate(completion.token_ids if one.logprobs else ()):
            assert token in completion.logprobs[place]
    assert [token_ids(output) for output in unheld] == alone * 2
    assert free_pages(llm) == pages


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_preempted_aborted_and_several(overlapped: bool, room: EngineRoom) -> None:
    """n texts of a request, a batch that does not fit its pages, and requests that go away."""
    dllm = {"strategy": "d2f", "block_length": 8, "canvas_length": 32}
    roomy = room.start("llada", dllm, async_scheduling=overlapped)
    asked = [
        schema_case("answer"),
        schema_case("flat"),
        regex_case(random.Random(5)),
    ] * 3
    prompts = [letters(30 + i, i) for i in range(len(asked))]
    ways = ["drafts", "auto", "automaton"]
    wishes = [
        wish(case.kind, case.spec, 60 + 4 * i, dllm_grammar=ways[i // 3])
        for i, case in enumerate(asked)
    ]
    expected = [token_ids(output) for output in generate(roomy, prompts, wishes)]
    several = wish("regex", "[a-z ]{4,15}", 20, n=3, temperature=2.0, seed=2)
    [output] = generate(roomy, [letters(9)], several)
    assert all(re.fullmatch("[a-z ]{4,15}", one.text) for one in output.outputs)
    assert len({one.text for one in output.outputs}) > 1
    engine = roomy.llm_engine
    for i, (prompt, one) in enumerate(zip(prompts, wishes, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, one)
    done: dict[str, Any] = {}
    aborted = False
    while engine.has_unfinished_requests():
        done |= {
            output.request_id: output for output in engine.step() if output.finished
        }
        if not aborted and scheduler(roomy).running:
            engine.abort_request(["0", "3"])
            aborted = True
    assert aborted
    left = [str(i) for i in range(len(asked)) if i not in (0, 3)]
    assert [token_ids(done[i]) for i in left] == [expected[int(i)] for i in left]
    assert not scheduler(roomy)._with_grammar
    tight = room.start(
        "llada", dllm, overlapped, block_size=32, num_gpu_blocks_override=14
    )
    outputs = generate(tight, prompts, wishes)
    assert num_preemptions(tight) > 0
    for case, output in zip(asked, outputs, strict=True):
        assert case.judge(output.outputs[0].text), (case.spec, output.outputs[0].text)
    assert [token_ids(output) for output in outputs] == expected


def test_a_turn_may_end_a_text(room: EngineRoom) -> None:
    """Chat models end a turn with a token of their own, which grammars know nothing of."""
    llm = room.start("llada", {"strategy": "d2f"})
    tokenizer = llm.get_tokenizer()
    end, start = (
        tokenizer.convert_tokens_to_ids(t)
        for t in ("<|eot_id|>", "<|start_header_id|>")
    )
    prompt = [start, *letters(8), end, start, *letters(5)]
    for bias, reason in ((100, end), (-100, None)):
        asked = wish("regex", "[a-c]{2,9}", 20, logit_bias={end: bias})
        [completion] = generate(llm, [prompt], asked)[0].outputs
        assert re.fullmatch("[a-c]{2,9}", completion.text)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)
        assert len(completion.text) == 2 or reason is None


@pytest.mark.parametrize("ahead", [False, True])
def test_guided_requests(ahead: bool, room: EngineRoom) -> None:
    """The hidden unconditional request has no grammar: it copies what the other one decides."""
    llm = room.start(
        "llada", {"strategy": "semi_autoregressive"}, async_scheduling=ahead
    )
    asked = [schema_case("flat"), regex_case(random.Random(7))] * 2
    wishes = [
        wish(case.kind, case.spec, 50, dllm_cfg_scale=0.7, dllm_grammar=way)
        for case, way in zip(asked, ["auto", "auto", "drafts", "drafts"], strict=True)
    ]
    prompts = [letters(8), letters(9)] * 2
    for case, output in zip(asked, generate(llm, prompts, wishes), strict=True):
        assert case.judge(output.outputs[0].text), output.outputs[0].text
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_guided_text_that_its_grammar_refuses(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cannot happen, says vLLM, which ends the request itself: the hidden one goes along."""
    from dllm_plugin.engine.grammars.automata import AutomatonGrammar

    llm = room.start(
        "llada", {"strategy": "semi_autoregressive"}, async_scheduling=False
    )
    monkeypatch.setattr(AutomatonGrammar, "accept_tokens", lambda *_: False)
    asked = wish("regex", "[a-c]{20,30}", 50, dllm_cfg_scale=0.7)
    engine = llm.llm_engine
    engine.add_request("refused", {"prompt_token_ids": letters(8)}, asked)
    assert set(scheduler(llm).requests) != {"refused"}
    deadline = time.monotonic() + 60  # steps are empty while its grammar is compiled
    while scheduler(llm).requests and time.monotonic() < deadline:
        engine.step()
    assert not engine.has_unfinished_requests() and not scheduler(llm).requests


def test_automata_beside_drafts_and_free_requests(room: EngineRoom) -> None:
    """Each gets what it gets alone, greedy and sampled; nothing waits for an automaton."""
    dllm = {"strategy": "d2f", "block_length": 8, "canvas_length": 32}
    llm = room.start("dream", dllm, async_scheduling=True)
    ways = ["automaton", "drafts", None] * 2
    cold, warm = {"temperature": 0.0}, {"temperature": 0.8, "seed": 4}
    wishes = [
        wish("json", SCHEMAS["flat"], 40, dllm_grammar=way, **(warm if i > 2 else cold))
        if way
        else params(40, **(warm if i > 2 else cold))
        for i, way in enumerate(ways)
    ]
    prompts = [letters(9 + i, i) for i in range(len(ways))]
    alone = [
        token_ids(generate(llm, [p], w)[0])
        for p, w in zip(prompts, wishes, strict=True)
    ]
    assert [token_ids(one) for one in generate(llm, prompts, wishes)] == alone
    engine, pending = llm.llm_engine, []
    update = scheduler(llm)._update_after_schedule

    def watch(output: Any) -> None:
        update(output)
        pending.append(output.pending_structured_output_tokens)

    scheduler(llm)._update_after_schedule = watch
    try:
        generate(llm, prompts, [wishes[0]] * len(prompts))
        assert pending and not any(pending)
        generate(llm, prompts, wishes)
        assert any(pending)
    finally:
        del scheduler(llm)._update_after_schedule
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_automata_among_rows_as_gpus_read_them(
    family: str, room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a chunk at once, whether anybody wants them or not: the same texts."""
    strategy = {"llada": "dual_cache", "dream": "d2f"}[family]
    llm = room.start(family, {"strategy": strategy}, async_scheduling=True)
    asked = [
        schema_case("answer"),
        schema_case("nested"),
        regex_case(random.Random(4)),
    ] * 2
    warm = {"temperature": 1.0, "seed": 5}
    wishes = []
    for i, case in enumerate(asked):
        how = {"dllm_grammar": "automaton"} | (warm if i > 2 else {})
        wishes.append(wish(case.kind, case.spec, 40, **how))
    prompts = [letters(9 + 3 * i, i) for i in range(len(asked))]
    expected = [token_ids(output) for output in generate(llm, prompts, wishes)]
    sampler = sampler_of(llm)
    for owner in (sampler.features[Automata], sampler.proposer):
        monkeypatch.setattr(owner, "on_cpu", False)
    assert [token_ids(output) for output in generate(llm, prompts, wishes)] == expected
    # As where memory holds the scores of one canvas alone.
    monkeypatch.setattr("dllm_plugin.sampling.features.automata.SCORES_AT_ONCE", 1)
    assert [token_ids(output) for output in generate(llm, prompts, wishes)] == expected


def test_an_automaton_looks_only_at_the_block(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the canvas; and its draws are the same where blocks of others are longer."""
    llm = room.start(
        "llada", {"strategy": "semi_autoregressive"}, async_scheduling=False
    )
    automata, columns = sampler_of(llm).features[Automata], list[int]()
    forward = automata.forward

    def noted(tables: Any, canvases: Any, score_GCK: Any) -> Any:
        columns.append(score_GCK.shape[1])
        return forward(tables, canvases, score_GCK)

    monkeypatch.setattr(automata, "forward", noted)
    prompts = [letters(9 + i, i) for i in range(8)]
    wishes = [
        wish(
            "regex",
            "([ab]|c[a-z]){9,30}",
            40,
            temperature=2.0,
            seed=i,
            dllm_block_length=8,
            dllm_grammar="automaton",
        )
        for i in range(len(prompts))
    ]
    alone = [token_ids(output) for output in generate(llm, prompts, wishes)]
    assert set(columns) == {8}
    longer = (
        letters(5),
        wish("regex", "[x-z]{40}", 40, dllm_block_length=32, dllm_grammar="automaton"),
    )
    beside = generate(llm, [*prompts, longer[0]], [*wishes, longer[1]])
    assert set(columns) == {8, 32}
    assert [token_ids(output) for output in beside[:-1]] == alone


def test_what_has_no_automaton(room: EngineRoom) -> None:
    """Drafts where nothing was asked for; by name a refusal, before anything runs or at once."""
    from vllm.exceptions import VLLMValidationError

    llm = room.start("fast-dllm-v2", {"strategy": "block_diffusion"})
    with pytest.raises(
        (ValueError, VLLMValidationError), match="row of its own: ask for 'drafts'"
    ):
        generate(llm, [letters(5)], wish("regex", "a+b", 9, dllm_grammar="automaton"))
    llm = room.start("llada", {"strategy": "d2f"})
    bounded = {"type": "integer", "minimum": 0, "maximum": 9}
    for way, reason in (("automaton", "error"), ("auto", "stop")):
        asked = wish("json", bounded, 9, dllm_grammar=way)
        [completion] = generate(llm, [letters(5)], asked)[0].outputs
        assert completion.finish_reason == reason
    assert json.loads(completion.text) in range(10)
