"""Token automata on a GPU: kernels against their reference, and whole texts by either of them."""

import random

import numpy as np
import pytest
import recorded
import torch
from automaton_sums import assert_within, exact_scores, exact_values
from engines import generate, letters, token_ids
from grammar_cases import choice_case, regex_case, schema_case, valid
from grammar_requests import wish
from test_full_compiled import sampler_of

from diffuplug_bench.word_problems.generator import (
    ANSWER_SCHEMA,
    ask_in_json,
    eval_seeds,
    problem,
)
from dllm_plugin import default_model
from dllm_plugin.commands.offline import conversation
from dllm_plugin.config.request.arguments import AUTOMATON, DRAFTS, GRAMMAR_MODES
from dllm_plugin.grammar.automaton import FAR, START, STOP, TokenAutomaton, build
from dllm_plugin.grammar.vocabulary import Vocabulary
from dllm_plugin.kernels.automaton import kernel, reference
from dllm_plugin.kernels.automaton.reference import END, OPEN, OUTSIDE, Canvases, Rows
from dllm_plugin.sampling.features.automata import Automata
from dllm_plugin.sampling.features.automaton_tables import AutomatonTables

DEVICE = torch.device("cuda")
NAMES = ("score_rows", "choose_ids", "forward", "backtrack")
LLADA, DREAM = 126_464, 152_064  # ids of a row


def random_automaton(vocab, states, classes, edges):
    """An automaton of these sizes, from whose every state a text can end."""
    rng = np.random.default_rng(states)
    class_V = rng.integers(STOP + 1, classes, vocab, dtype=np.int32)
    class_V[:9], class_V[9], class_V[10 : 10 + classes - 2] = (
        0,
        STOP,
        np.arange(2, classes),
    )
    pairs = np.unique(
        np.concatenate([np.arange(states - 1), rng.integers(0, states - 1, edges)])
        * classes
        + rng.integers(STOP + 1, classes, edges + states - 1)
    )
    inner = np.stack(
        [pairs // classes + 1, pairs % classes, rng.integers(1, states, len(pairs))]
    )
    ends = [(state, STOP, END) for state in (END, *range(1, states, 3))]
    edge_E3 = np.concatenate([inner.T, np.array(ends)])
    edge_E3 = edge_E3[np.lexsort((edge_E3[:, 1], edge_E3[:, 0], edge_E3[:, 2]))]
    far_Q = rng.integers(0, 5, states)
    far_Q[END] = 0
    order_V = np.argsort(class_V, kind="stable")
    columns = (
        *(class_V, order_V, np.searchsorted(class_V[order_V], np.arange(classes + 1))),
        *edge_E3.T,
        *(np.searchsorted(edge_E3[:, 2], np.arange(states + 1)), far_Q),
    )
    return TokenAutomaton(
        *(np.ascontiguousarray(column, dtype=np.int32) for column in columns)
    )


def schema_automaton(vocab):
    """That of a JSON schema, over bytes and words."""
    spelled = [bytes([i]) for i in range(256)] + [
        f"w{i}".encode() for i in range(256, vocab - 2)
    ]
    vocabulary = Vocabulary(
        [*spelled, b"", b""], [vocab - 2, vocab - 1], lambda text: []
    )
    schema = '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}'
    return build({"schema": schema, "whitespace": "[ ]?"}, vocabulary, [vocab - 2])


def walked(automaton, rng, length):
    """Classes of a random walk from a random state, and the states at its ends."""
    first = state = rng.randrange(START, len(automaton.far_Q))
    kinds = []
    while len(kinds) < length:
        edges = np.flatnonzero(automaton.source_E == state)
        if not len(edges):  # of states that only END is behind there are others
            return walked(automaton, rng, length)
        edge = rng.choice(edges.tolist())
        kinds.append(int(automaton.class_E[edge]))
        state = int(automaton.target_E[edge])
    return kinds, first, state


def canvases_of(automata, length, temperatures):
    """A canvas per temperature: some decided places, prompt tails and ends among them."""
    rng, given, columns = random.Random(length), [], []
    for i in range(len(temperatures)):
        which = i % len(automata)
        kinds, first, last = walked(automata[which], rng, length)
        given.append([kind if rng.random() < 0.3 * (i % 4) else OPEN for kind in kinds])
        if i % 3 == 2:
            given[-1] = [OUTSIDE] * 5 + given[-1][: length - 9] + [OUTSIDE] * 4
            kinds = kinds[: length - 9]
            last = first
            for kind in kinds:
                last = follow(automata[which], last, kind)
        room = FAR if i % 5 == 4 else int(automata[which].far_Q[last]) + i % 2
        columns.append((which, first, room, 1000 + 7 * i, i + 2, 64 * i))
    which, state, room, seed, step, position = torch.tensor(
        columns, device=DEVICE
    ).T.contiguous()
    tensors = (
        torch.tensor(given, device=DEVICE),
        room,
        torch.tensor(temperatures, device=DEVICE),
    )
    return Canvases(which, state, *tensors, seed, step, position)


def follow(automaton, state, kind):
    found = np.flatnonzero((automaton.source_E == state) & (automaton.class_E == kind))
    return int(automaton.target_E[found[0]])


def rows_of(which, length, vocab, dtype):
    """Logits of every position, as a step reads them; a few are broken."""
    count = len(which.which_G) * length
    logits = torch.randn(count, vocab, device=DEVICE, dtype=dtype) * 4
    logits[1, 5], logits[2, 77], logits[3] = float("nan"), float("inf"), float("-inf")

    def repeated(value):
        return value.repeat_interleave(length)

    place = torch.arange(length, device=DEVICE).repeat(len(which.which_G))
    bias = torch.randn(3, vocab, device=DEVICE)
    bias[0] = 0.0  # of requests without one
    slots = torch.arange(len(which.which_G), device=DEVICE)
    return Rows(
        *(logits, torch.arange(count, device=DEVICE).flip(0), repeated(slots)),
        *map(repeated, (which.which_G, which.temperature_G, which.seed_G)),
        *(repeated(which.position_G) + place, repeated(which.step_G), vocab - 1),
        (bias, slots % 3),
    )


def few(rows, low):
    """Some of the rows: the reference copies what it reads, in float64 where it draws."""
    cut = {
        name: getattr(rows, name)[low : low + 64]
        for name in Rows._fields
        if name[-2:] == "_T"
    }
    return rows._replace(**cut)


SIZES = [(53, 49, 300), (223, 145, 2500), (4096, 1500, 60_000)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [32, 64])
@pytest.mark.parametrize("sizes", [*SIZES, None], ids=str)
def test_kernels_are_the_reference(sizes, length, dtype):
    """Two automata, nine canvases, greedy and sampled; each kernel on exact results, rounded.

    The reference's own float32 sums over 150,000 ids are no measure: they add one by one.
    """
    vocab = DREAM if sizes is None else LLADA
    made = [
        schema_automaton(vocab) if sizes is None else random_automaton(vocab, *sizes)
    ]
    made.append(random_automaton(vocab, 90, 70, 800))
    held = AutomatonTables(DEVICE)
    assert [held.add(i, automaton) for i, automaton in enumerate(made)] == [0, 1]
    which = canvases_of(made, length, [0.0, 0.0, 0.8, 1.0, 0.0, 0.3, 0.0, 0.0, 2.0])
    rows, tables = rows_of(which, length, vocab, dtype), held.tables
    starts = range(0, len(rows.source_T), 64)
    found = kernel.score_rows(tables, rows)
    parts = []
    for low in starts:
        exact, allowed = exact_scores(tables, few(rows, low), kernel.TILE)
        assert_within(found[low : low + 64], exact, allowed)
        parts.append(exact.float())
    scores = torch.cat(parts).reshape(len(which.which_G), length, -1)
    exact, allowed = exact_values(tables, which, scores, kernel.EDGES)
    assert_within(kernel.forward(tables, which, scores), exact, allowed)
    values = exact.float()
    path = reference.backtrack(tables, which, scores, values)
    found = kernel.backtrack(tables, which, scores, values)
    assert torch.equal(found.class_GC, path.class_GC)
    assert torch.equal(found.state_GC1, path.state_GC1)
    far_G = tables.far_AQ[which.which_G, path.state_GC1[:, -1]]
    assert (far_G <= which.room_G).all()
    class_T = path.class_GC.flatten()
    parts = [
        reference.choose_ids(tables, few(rows, low), class_T[low : low + 64])
        for low in starts
    ]
    has_class = class_T >= 0
    chosen = kernel.choose_ids(tables, rows, class_T)[has_class]
    assert torch.equal(chosen, torch.cat(parts)[has_class])
    kinds = tables.class_AV[rows.which_T[has_class], chosen]
    assert torch.equal(kinds.to(torch.int64), class_T[has_class])


BUNDLED = {
    "checkpoint": default_model.path(),
    "dllm": {
        "strategy": "d2f",
        "lora_path": default_model.adapter_path(),
        "threshold": 0.9,
    },
}
ENGINES = {
    "bundled": BUNDLED,
    "bundled-eager": BUNDLED | {"enforce_eager": True},
    "full attention": {
        "checkpoint": "checkpoints/tiny-llada",
        "dllm": {"strategy": "dual_cache"},
    },
    "shifted": {"checkpoint": "checkpoints/tiny-dream", "dllm": {"strategy": "d2f"}},
    "grid": {"checkpoint": "checkpoints/tiny-sdar", "dllm": {}},
}


def asked_of(llm, bundled, **given):
    """Prompts, parameters, and what judges each text: schemas, expressions and words."""
    rng = random.Random(4)
    cases = [
        schema_case("answer"),
        schema_case("nested"),
        regex_case(rng),
        choice_case(rng),
    ]
    prompts = [letters(9 + 3 * i, i) for i in range(len(cases))]
    if bundled:
        chats = [
            conversation(ask_in_json(problem(i)).question)
            for i in eval_seeds(len(cases))
        ]
        prompts = [
            llm.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True)[
                "input_ids"
            ]
            for chat in chats
        ]
    judges, wishes = [case.judge for case in cases] * 2, []
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        for case in cases:
            wishes.append(wish(case.kind, case.spec, 64, **options, **given))
    if bundled:
        prompts.append(prompts[0])
        wishes.append(wish("json", ANSWER_SCHEMA, 160, **given))
        judges.append(valid(ANSWER_SCHEMA))
    return prompts, wishes, judges


@pytest.mark.parametrize("name", ENGINES)
def test_texts_by_kernels_are_those_by_the_reference(name, monkeypatch):
    """In float32, alone and all at once, greedy and sampled."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = recorded.start(**ENGINES[name])
    prompts, wishes, judges = asked_of(
        llm, name.startswith("bundled"), dllm_grammar="automaton"
    )
    prompts = [prompts[i % len(prompts)] for i in range(len(wishes))]
    automata = sampler_of(llm).features[Automata]
    assert not automata.on_cpu and automata.forward is kernel.forward
    by_kernels = generate(llm, prompts, wishes)
    alone = [generate(llm, [p], w)[0] for p, w in zip(prompts, wishes, strict=True)]
    for part in NAMES:
        setattr(automata, part, getattr(reference, part))
    by_reference = generate(llm, prompts, wishes)
    llm.llm_engine.engine_core.shutdown()
    for output, judge in zip(by_kernels, judges, strict=True):
        assert judge(output.outputs[0].text), output.outputs[0].text
    counts = [
        output.outputs[0].spec_decode_metrics.per_step_drafted for output in by_kernels
    ]
    assert {found for _, found in counts} == {GRAMMAR_MODES.index(AUTOMATON)}
    tokens = [token_ids(output) for output in by_kernels]
    assert tokens == [token_ids(output) for output in by_reference]
    assert tokens == [token_ids(output) for output in alone]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["bundled", "shifted"])
def test_texts_by_drafts_are_valid(name, ahead, monkeypatch):
    """Greedy and sampled, whether or not a step is planned before its canvases are checked."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = recorded.start(**ENGINES[name], async_scheduling=ahead)
    prompts, wishes, judges = asked_of(llm, name == "bundled", dllm_grammar="drafts")
    prompts = [prompts[i % len(prompts)] for i in range(len(wishes))]
    outputs = generate(llm, prompts, wishes)
    llm.llm_engine.engine_core.shutdown()
    for output, judge in zip(outputs, judges, strict=True):
        assert judge(output.outputs[0].text), output.outputs[0].text
        _, found = output.outputs[0].spec_decode_metrics.per_step_drafted
        assert found == GRAMMAR_MODES.index(DRAFTS)
