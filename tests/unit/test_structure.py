"""LLaDA2.2: blocks that delete and insert tokens, and experts that a block shares."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from grammar_cases import random_case
from grammar_loop import (
    CONTEXT,
    Compiler,
    GrammarLoop,
    Wants,
    ask,
    judged,
    random_text,
    text_of,
)
from scripted import EOS, MASK, VOCAB, Loop, Run, sampling
from scripted_rows import Hashed, Script

from dllm_plugin.config.options import Options
from dllm_plugin.config.resolution import resolve
from dllm_plugin.decoding.structure import Row, Tokens, restructure
from dllm_plugin.models.mixtures import allowed_experts, number_blocks
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

Case = dict[str, Any]
ARCHITECTURE = "LLaDA22MoeModelLM"
DELETE, SPLIT = 12, 13
LENGTH = 4


class ScriptedRows:
    """Rows of a script for every position, as edits read them."""

    mask_id, shift = MASK, False

    def __init__(self, script: Script, bias: dict[int, float]) -> None:
        self.script = script
        self.bias = np.zeros(VOCAB, dtype=np.float32)
        self.bias[list(bias)] = list(bias.values())

    def predictions(self, tokens: list[int], block: list[int]) -> torch.Tensor:
        logits = torch.zeros(len(tokens), VOCAB)
        for position, seen in enumerate(block):
            visible = [t for t, b in zip(tokens, block, strict=True) if b <= seen]
            row = self.script(visible, position) + self.bias
            logits[position] = torch.from_numpy(row)
        return logits

    def rows_at(self, start: int, tokens: list[int], slots: Any) -> torch.Tensor:
        raise AssertionError("no loop of blocks asks for this")


def loop_of(canvas: int = 2 * LENGTH, slots: int = 8) -> Loop:
    options = Options.from_user({"canvas_length": canvas})
    config = resolve(options, ARCHITECTURE, 64, MASK, (), LENGTH, True)
    config = dataclasses.replace(config, structure_token_ids=(DELETE, SPLIT))
    return Loop({}, slots=slots, config=config)


def case_of(rng: np.random.Generator) -> Case:
    return {
        "seed": int(rng.integers(0, 250)),
        "prompt": rng.integers(0, DELETE, LENGTH * int(rng.integers(1, 4))).tolist(),
        "max_tokens": int(rng.integers(1, 20)),
        "threshold": float(rng.choice([0.2, 0.4, 0.6, 0.9])),
        "editing_threshold": float(rng.choice([0, 0, 0.3, 0.6])),
        "max_post_steps": int(rng.choice([0, 1, 2, 5, 16])),
        "steps": int(rng.choice([1, 2, 3, 4, 6])),
        "temperature": float(rng.choice([0, 0, 0.8])),
        "stop": {EOS} if rng.random() < 0.5 else set(),
        "bias": {},
    }


def with_rules(rng: np.random.Generator, case: Case) -> Case:
    """A case with penalties, and with a bias of some tokens."""
    numbers = {
        "repetition_penalty": float(rng.choice([0.7, 1.0, 1.5])),
        "presence_penalty": float(rng.choice([-1.0, 0.0, 2.0])),
        "frequency_penalty": float(rng.choice([0.0, 0.3, 1.0])),
    }
    tokens = rng.permutation(MASK)[:5].tolist()
    biases = [{}, dict.fromkeys(tokens, 2.0), dict.fromkeys(tokens, -100.0)]
    return case | numbers | {"bias": biases[rng.integers(0, 3)]}


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NUMBERS = ("threshold", "editing_threshold", "max_post_steps", "steps")


def begin(loop: Loop, case: Case, name: str) -> Run:
    numbers = {f"dllm_{number}": case[number] for number in NUMBERS}
    params = sampling(
        case["max_tokens"],
        ignore_eos=not case["stop"],
        temperature=case["temperature"],
        seed=case["seed"],
        logit_bias=case["bias"] or None,
        **{name: case[name] for name in PENALTIES if name in case},
        **numbers,
    )
    return loop.start(case["prompt"], Hashed(case["seed"]), params, req_id=name)


def plain(case: Case) -> tuple[list[int], int]:
    numbers = {name: case[name] for name in NUMBERS + PENALTIES if name in case}
    rules = Rules(
        "structure",
        "joint_threshold",
        LENGTH,
        on_grid=True,
        seed=case["seed"],
        temperature=case["temperature"],
        structure=(DELETE, SPLIT),
        **numbers,
    )
    model = ScriptedRows(Hashed(case["seed"]), case["bias"])
    return decode(Text(model, case["prompt"], case["max_tokens"], rules, case["stop"]))


def test_random_models_decode_as_the_plain_loop() -> None:
    """Together, arriving one after the other; a commit rides along with the next block."""
    rng = np.random.default_rng(5)
    cases = [case_of(rng) for _ in range(60)]
    loop, runs = loop_of(slots=64), []
    for i, case in enumerate(cases):
        runs.append(begin(loop, case, str(i)))
        loop.step()
    loop.run()
    for case, run in zip(cases, runs, strict=True):
        assert (run.output, len(run.passes)) == tuple(plain(case)), case


def test_rules_of_tokens_as_in_the_plain_loop() -> None:
    """Biases hold in every row; penalties where masks are filled, and not for edits."""
    rng = np.random.default_rng(8)
    cases = [with_rules(rng, case_of(rng)) for _ in range(60)]
    loop = loop_of(slots=64)
    runs = [begin(loop, case, str(i)) for i, case in enumerate(cases)]
    loop.run()
    without = 0
    for case, run in zip(cases, runs, strict=True):
        assert (run.output, len(run.passes)) == tuple(plain(case)), case
        free = {name: case[name] for name in case if name not in PENALTIES}
        without += plain(free)[0] != run.output
    assert without > len(cases) / 3


def test_a_canvas_of_one_block_commits_by_itself() -> None:
    rng = np.random.default_rng(6)
    for _ in range(8):
        case, loop = case_of(rng), loop_of(canvas=LENGTH)
        run = begin(loop, case, "alone")
        loop.run()
        tokens, forwards = plain(case)
        assert run.output == tokens and len(run.passes) >= forwards


def test_a_preempted_block_goes_on() -> None:
    """What was inserted, seen and counted comes back with the canvas."""
    rng = np.random.default_rng(7)
    for preempted_after in (1, 2, 3, 5) * 4:
        case, loop = case_of(rng), loop_of()
        run = begin(loop, case, "preempted")
        for _ in range(1 + preempted_after):
            if loop.running:
                loop.step()
        if not loop.running:
            continue
        loop.preempt(run)
        loop.resume(run)
        loop.run()
        assert (run.output, len(run.passes)) == tuple(plain(case)), case


class WantsToMove(Wants):
    """Logits that like to delete and to insert."""

    def __call__(self, visible: list[int], position: int) -> np.ndarray:
        row = super().__call__(visible, position)
        row[[487, 488]] += 12 * (self.rng.random(2) < 0.3)
        return row


@pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
def test_texts_under_a_grammar_are_valid(single_rank: None) -> None:
    """Beside texts whose tokens move: under a grammar nothing is deleted or inserted."""
    options = Options.from_user({"canvas_length": 16})
    config = resolve(options, ARCHITECTURE, CONTEXT, GrammarLoop.mask, (), 8, True)
    config = dataclasses.replace(config, structure_token_ids=(487, 488))
    compiler, checked = Compiler("xgrammar"), 0
    compiler.grammars.config = config
    for seed in range(8):
        rng, loop = random.Random(seed), GrammarLoop({}, config=config)
        loop.begin(WantsToMove(seed, None, 0.0), ask(24), None, range(8))
        asked: list[Any] = []
        for heat in (0.0, 0.0, 0.9):
            case = random_case(rng)
            params = ask(64, temperature=heat, seed=seed, presence_penalty=seed % 2)
            grammar = compiler.compile(case.kind, case.spec, params)
            # The prompt has five positions more than that of other scripts.
            wants = [0] * 5 + random_text(grammar.state, rng, 60)
            completes = grammar.state.completes
            script = WantsToMove(seed, wants, 0.2)
            run = loop.begin(script, params, grammar, range(8))
            asked.append((case, grammar.state, completes, run))
        loop.run(limit=600)
        for case, state, completes, run in asked:
            assert not {487, 488, loop.mask} & set(run.output)
            assert not completes or judged(case, text_of(state, run.output)), case.spec
            checked += completes
    compiler.close()
    assert checked > 15


@pytest.mark.parametrize(
    ("new", "after", "inserted"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], []),
        ([1, DELETE, 3, 4], [1, 3, 4, MASK], [3]),
        ([1, SPLIT, 3, 4], [1, MASK, 8, 3], [1]),
        ([SPLIT, DELETE, SPLIT, DELETE], [MASK, 7, MASK, 9], [0, 2]),
        ([1, 2, 3, SPLIT], [1, 2, 3, MASK], [3]),
        ([DELETE] * 4, [MASK] * 4, [0, 1, 2, 3]),
    ],
)
def test_structure(new: list[int], after: list[int], inserted: list[int]) -> None:
    """A deleted token leaves; a split one becomes a mask and what stood there before."""
    yes, nothing = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4).bool()
    old = torch.tensor([[7, 8, 9, 10]])
    place = torch.arange(4)[None]
    row = Row(yes[:, 0], place[:, 0], place, yes, nothing, yes, old)
    tokens = Tokens(MASK, DELETE, SPLIT, None, None)  # type: ignore[arg-type]
    found, where = restructure(torch.tensor([new]), row, nothing, tokens)
    assert found.tolist() == [after]
    assert where[0].nonzero().flatten().tolist() == inserted
    # Of a prompt nothing moves.
    kept = row._replace(free_RB=nothing)
    assert restructure(torch.tensor([new]), kept, nothing, tokens)[0].tolist() == [new]


def test_blocks_of_a_forward() -> None:
    """By position, and anew with each request; padding is a block by itself."""
    positions = [64, 65, 66, 67, 0, 1, 2, 3, 4, 5, 8, 9, 0, 0]
    found = number_blocks(torch.tensor(positions), 4)
    assert found.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 5]


def test_experts_of_a_block() -> None:
    """The best of a block's tokens decide, and no token of another block does."""
    ranked = torch.tensor([[0.9, 0.1, 0.2], [0.3, 0.1, 0.8], [0.1, 0.9, 0.8]])
    found = allowed_experts(ranked, torch.tensor([0, 0, 1]), 2)
    both = [True, False, True]
    assert found.tolist() == [both, both, [False, True, True]]
