"""Random grammars, logits and ways to decode: every text is valid, and complete where one fits.

``DIFFUPLUG_GRAMMAR_TRIALS=5000`` tries more of them than `make test-all` has time for.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from grammar_cases import (
    CLASSES,
    PARTS,
    SCHEMAS,
    choice_case,
    random_case,
    regex_case,
    schema_case,
)
from grammar_loop import (
    EOS,
    MASK,
    VOCAB,
    Compiler,
    GrammarLoop,
    Wants,
    ask,
    judged,
    random_text,
    text_of,
)

from dllm_plugin.grammar.automaton import END, START, TokenAutomaton
from dllm_plugin.grammar.state import GrammarState

pytestmark = [
    pytest.mark.slow,
    # vLLM gives xgrammar an argument that it no longer reads.
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),
]

TRIALS = int(os.environ.get("DIFFUPLUG_GRAMMAR_TRIALS", "112"))
TOGETHER = 7  # requests of a batch, besides a free one
BUDGETS = (8, 16, 24, 40, 64, 96)


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def compiler(request: pytest.FixtureRequest, single_rank: None) -> Iterator[Compiler]:
    compiler = Compiler(request.param)
    yield compiler
    compiler.close()


def shape(rng: random.Random) -> tuple[dict[str, Any], bool]:
    """How a batch is decoded: options, and whether logits are shifted."""
    block = rng.choice([4, 8, 16, 32])
    strategy = rng.choice(["d2f", "block_diffusion", "several"])
    options: dict[str, Any] = {
        "strategy": strategy,
        "block_length": block,
        "canvas_length": 64,
    }
    if strategy == "several":
        options |= {
            "strategy": "block_diffusion",
            "max_active_blocks": 64 // block - 1 or 1,
        }
    if strategy == "d2f":
        options["max_active_blocks"] = 64 // block
    return options, rng.random() < 0.3


def request(
    compiler: Compiler, loop: GrammarLoop, rng: random.Random
) -> tuple[Any, ...] | None:
    """Start a random request; None if the backend does not take its grammar."""
    case, budget = random_case(rng), rng.choice(BUDGETS)
    policy = rng.choice(sorted(loop.config.method.policies))
    options: dict[str, Any] = {"dllm_policy": policy}
    if policy == "threshold":
        options["dllm_threshold"] = rng.choice(
            [0.0, 0.5, 0.9]
        )  # 0 takes everything at once
    if rng.random() < 0.3:
        options |= {"temperature": 1.0, "seed": rng.randint(0, 99)}
    params = ask(budget, **options)
    try:
        grammar = compiler.compile(case.kind, case.spec, params)
    except (RuntimeError, ValueError):
        return None
    grammar.state.jumps = rng.random() < 0.8
    fault = rng.choice([0.0, 0.05, 0.3])
    wants = random_text(grammar.state, rng, 120) if rng.random() < 0.7 else None
    completes = grammar.state.completes
    run = loop.begin(Wants(rng.randint(0, 1 << 30), wants, fault), params, grammar)
    return case, grammar.state, completes, run, budget


def random_path(automaton: TokenAutomaton, rng: random.Random, most: int) -> list[int]:
    """A random text of an automaton, or its beginning."""
    state, ids = START, []
    while len(ids) < most and state != END:
        edge = rng.choice(np.flatnonzero(automaton.source_E == state).tolist())
        low, high = automaton.bound_K1[automaton.class_E[edge] :][:2].tolist()
        ids.append(int(automaton.order_V[rng.randrange(low, high)]))
        state = int(automaton.target_E[edge])
    return ids


def automaton_request(
    compiler: Compiler, loop: GrammarLoop, rng: random.Random
) -> tuple[Any, ...] | None:
    """Start a random request that decodes by an automaton; None if it has none."""
    kind, budget = rng.random(), rng.choice(BUDGETS)
    case = (
        schema_case(rng.choice(list(SCHEMAS)))
        if kind < 0.4
        else regex_case(rng, PARTS + CLASSES)
    )
    case = choice_case(rng) if kind > 0.8 else case
    policy = rng.choice(sorted(loop.config.method.policies))
    options: dict[str, Any] = {"dllm_policy": policy, "dllm_grammar": "automaton"}
    if policy == "threshold":
        options["dllm_threshold"] = rng.choice([0.0, 0.5, 0.9])
    if rng.random() < 0.3:
        options |= {"temperature": 1.0, "seed": rng.randint(0, 99)}
    if rng.random() < 0.2:
        options["logprobs"] = 2
    if rng.random() < 0.2:
        options["logit_bias"] = {rng.randrange(480): rng.choice([-5.0, 5.0])}
    params = ask(budget, **options)
    compiler.grammars.config = loop.config
    try:
        grammar = compiler.compile(case.kind, case.spec, params)
    except (RuntimeError, ValueError):
        return None
    wants = (
        random_path(grammar.guide.automaton, rng, 120) if rng.random() < 0.7 else None
    )
    script = Wants(rng.randint(0, 1 << 30), wants, rng.choice([0.0, 0.05, 0.3]))
    return case, grammar, loop.begin(script, params, grammar), budget


class ByPosition:
    """Logits that depend on the position alone."""

    def __init__(self, seed: int) -> None:
        self.rows = (
            np.random.default_rng(seed).standard_normal((256, VOCAB)).astype(np.float32)
        )

    def __call__(self, visible: list[int], position: int) -> np.ndarray:
        return self.rows[position]


def left_to_right(state: GrammarState, script: ByPosition, most: int) -> list[int]:
    """Plain constrained decoding, one token per forward."""
    matcher, ids = state.matcher.fork(), []
    while len(ids) < most and EOS not in ids:
        bits = (
            np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")[:VOCAB]
            > 0
        )
        bits[EOS] = matcher.complete()
        ids.append(int(np.where(bits, script.rows[3 + len(ids)], -np.inf).argmax()))
        assert ids[-1] == EOS or matcher.accept(ids[-1])
    return ids


def test_one_position_after_the_other_is_plain_decoding(compiler: Compiler) -> None:
    """Blocks of one position, nothing written ahead, and a budget that does not press."""
    compared = 0
    for seed in range(12):
        rng = random.Random(seed)
        case = random_case(rng)
        loop = GrammarLoop(
            {"strategy": "block_diffusion", "block_length": 1, "canvas_length": 4}
        )
        params = ask(150)
        grammar = compiler.compile(case.kind, case.spec, params)
        grammar.state.jumps = False
        script = ByPosition(seed)
        expected = left_to_right(grammar.state, script, 100)
        run = loop.begin(script, params, grammar)
        loop.run(limit=700)
        if EOS in expected:
            assert run.output == expected, (seed, case.spec)
            compared += 1
    assert compared > 4


def test_every_text_is_valid(compiler: Compiler) -> None:
    """G1 to G6 of every trial; judged by re, jsonschema and lark."""
    tally: Counter[str] = Counter()
    share = TRIALS // 2
    seed = 0
    while tally["trials"] < share:
        seed += 1
        rng = random.Random(f"{compiler.backend} {seed}")
        options, shift = shape(rng)
        loop = GrammarLoop(options, shift)
        started = [request(compiler, loop, rng) for _ in range(min(TOGETHER, share))]
        requests = [one for one in started if one is not None]
        tally["not compiled"] += len(started) - len(requests)
        free = loop.begin(Wants(seed, None, 0.0), ask(24), None)
        loop.run(limit=600)
        assert free.done
        for case, state, completes, run, budget in requests:
            label = (seed, options, case.kind, case.spec, budget, run.output)
            tally["trials"] += 1
            tally[f"{case.kind}, {'complete' if completes else 'beginning'}"] += 1
            tally["refused drafts"] += state.num_refused
            assert len(run.output) <= budget and MASK not in run.output, label
            assert EOS not in run.output[:-1], label
            assert not any(state.vocabulary.never[i] for i in run.output if i != EOS), (
                label
            )
            blocks = -(-budget // options["block_length"]) * options["block_length"]
            assert len(run.passes) <= 3 * blocks + 8, label
            text = text_of(state, run.output)
            if completes:
                assert judged(case, text), (text, *label)
            elif run.output[-1:] != [EOS]:
                assert len(run.output) == budget, label
    print(compiler.backend, dict(tally))
    assert tally["refused drafts"] > 0
    for kind in ("json", "regex", "grammar"):
        assert tally[f"{kind}, complete"] > 0


def test_every_text_of_an_automaton_is_valid(compiler: Compiler) -> None:
    """G1 to G6 as above. Nothing is dropped: a block takes as many forwards as it has positions."""
    tally: Counter[str] = Counter()
    share = TRIALS // 2
    seed = 0
    while tally["trials"] < share:
        seed += 1
        rng = random.Random(f"automaton {compiler.backend} {seed}")
        options, shift = shape(rng)
        loop = GrammarLoop(options, shift)
        started = [
            automaton_request(compiler, loop, rng) for _ in range(min(TOGETHER, share))
        ]
        requests = [one for one in started if one is not None]
        tally["without one"] += len(started) - len(requests)
        free = loop.begin(Wants(seed, None, 0.0), ask(24), None)
        loop.run(limit=600)
        assert free.done
        for case, grammar, run, budget in requests:
            label = (seed, options, case.kind, case.spec, budget, run.output)
            tally["trials"] += 1
            tally[
                f"{case.kind}, {'complete' if grammar.completes else 'beginning'}"
            ] += 1
            assert len(run.output) <= budget and MASK not in run.output, label
            assert EOS not in run.output[:-1], label
            blocks = -(-budget // options["block_length"]) * options["block_length"]
            assert len(run.passes) <= 2 * blocks + 8, label
            vocabulary = compiler.grammars.vocabulary
            assert vocabulary is not None
            text = vocabulary.text(i for i in run.output if i != EOS).decode(
                "utf-8", "replace"
            )
            if grammar.completes:
                assert judged(case, text), (text, *label)
            elif run.output[-1:] != [EOS]:
                assert len(run.output) == budget, label
    print(compiler.backend, dict(tally))
    for kind in ("json", "regex", "choice"):
        assert tally[f"{kind}, complete"] > 0
