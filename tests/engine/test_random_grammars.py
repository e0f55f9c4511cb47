"""Random grammars on the real engine, where no script can play the model.

Under full attention, and in steps of single blocks, which become steps of whole canvases when few
requests are left. Every text is valid, and complete where one fits, as in
``tests/unit/test_structured_random.py``, whose steps compute whole canvases of blocks. In every
second batch requests are preempted, so blocks of full attention start again.
"""

import os
import random
import re
from collections import Counter
from typing import Any

import pytest
from engines import (
    EngineRoom,
    forwards,
    generate,
    letters,
    num_preemptions,
    params,
    scheduler,
    token_ids,
)
from full_jobs import run_interrupted
from grammar_cases import random_case

pytestmark = pytest.mark.slow

TRIALS = int(os.environ.get("DIFFUPLUG_GRAMMAR_TRIALS", "32"))
TOGETHER = 8  # requests of a batch, besides a free one
BUDGETS = (8, 16, 24, 40, 64)
EVERY = 17  # steps: a block of 4 takes at most three a position, and a few to begin
EOS, MASK = 257, 300
FEW = (
    4  # requests from which on steps compute single blocks, where there are such steps
)
STRATEGIES = ["semi_autoregressive", "prefix_cache", "dual_cache", "block_diffusion"]


def random_wish(
    rng: random.Random, policies: list[str], blocks: list[int]
) -> tuple[Any, Any]:
    """A case, and parameters of a request for it."""
    from vllm.sampling_params import StructuredOutputsParams

    case, policy, block = random_case(rng), rng.choice(policies), rng.choice(blocks)
    options: dict[str, Any] = {"dllm_policy": policy, "dllm_block_length": block}
    options["dllm_grammar"] = rng.choice(["drafts", "drafts", "auto"])
    if policy == "threshold":
        options["dllm_threshold"] = rng.choice(
            [0.0, 0.5, 0.9]
        )  # 0 takes everything at once
    if rng.random() < 0.3:
        options |= {"temperature": 1.0, "seed": rng.randint(0, 99)}
    asked = StructuredOutputsParams(**{case.kind: case.spec})
    return case, params(
        rng.choice(BUDGETS), ignore_eos=False, structured_outputs=asked, **options
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether each request's grammar has a text that was found and fits, by its number."""
    from dllm_plugin.engine.grammars.automata import AutomatonGrammar
    from dllm_plugin.engine.grammars.grammars import Grammars

    found: dict[str, bool] = {}
    make = Grammars._make

    def note(self: Grammars, request: Any) -> Any:
        grammar = make(self, request)
        own = grammar if isinstance(grammar, AutomatonGrammar) else grammar.state
        found[request.request_id.partition("-")[0]] = own.completes
        return grammar

    monkeypatch.setattr(Grammars, "_make", note)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_text_is_valid(
    strategy: str, room: EngineRoom, made: dict[str, bool]
) -> None:
    dllm: dict[str, Any] = {"strategy": strategy, "canvas_length": 64}
    if strategy == "block_diffusion":
        dllm |= {"block_length": 32, "commit_alone_from": FEW}
    llm = room.start("llada", dllm)
    free = letters(9), params(24, dllm_block_length=4)
    alone = token_ids(generate(llm, [free[0]], free[1])[0])
    policies = sorted(scheduler(llm).decode_config.method.policies)
    tally, before = Counter[str](), num_preemptions(llm)
    while tally["trials"] < TRIALS:
        rng, preempted = (
            random.Random(f"{strategy} {tally['trials']}"),
            tally["batches"] % 2,
        )
        blocks = [4] if preempted else [4, 8, 16, 32]
        cases, wishes = zip(
            *(random_wish(rng, policies, blocks) for _ in range(TOGETHER)), strict=True
        )
        pairs = [(letters(5 + i, i), wish) for i, wish in enumerate(wishes)]
        outputs = run_interrupted(llm, [*pairs, free], EVERY if preempted else 10_000)
        assert token_ids(outputs.pop()) == alone
        tally["batches"] += 1
        for i, (case, wish, output) in enumerate(
            zip(cases, wishes, outputs, strict=True)
        ):
            completes = made[str(i)]
            ids, text = token_ids(output), output.outputs[0].text
            label = case.kind, case.spec, wish.extra_args, wish.max_tokens, text
            tally["trials"] += 1
            tally[f"{case.kind}, {'complete' if completes else 'beginning'}"] += 1
            assert len(ids) <= wish.max_tokens and MASK not in ids, label
            assert EOS not in ids[:-1], label
            length = wish.extra_args["dllm_block_length"]
            whole = -(-wish.max_tokens // length) * length
            assert preempted or forwards(output) <= 3 * whole + 8, label
            if completes:
                assert case.judge(text), label
            elif ids[-1:] != [EOS]:
                assert len(ids) == wish.max_tokens, label
    print(strategy, dict(tally), num_preemptions(llm) - before)
    assert num_preemptions(llm) > before
    for kind in ("json", "regex", "grammar"):
        assert tally[f"{kind}, complete"] > 0


@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("alone_from", [0, 1], ids=["canvases", "single blocks"])
def test_a_text_that_ends_where_a_block_ends(
    alone_from: int, overlapped: bool, room: EngineRoom
) -> None:
    """Its stop token is written to a block that no step of single blocks has computed yet."""
    from vllm.sampling_params import StructuredOutputsParams

    dllm = {"strategy": "block_diffusion", "block_length": 8, "canvas_length": 16}
    llm = room.start("llada", dllm | {"commit_alone_from": alone_from}, overlapped)
    engine = llm.llm_engine
    for regex in ("[0-9]{7}", "[0-9]{8}", "[0-9]{16}"):
        for way in ("drafts", "automaton"):
            held = StructuredOutputsParams(regex=regex)
            asked = params(
                40, ignore_eos=False, structured_outputs=held, dllm_grammar=way
            )
            engine.add_request(way, {"prompt_token_ids": letters(9)}, asked)
        done: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished_requests():
            done |= {
                output.request_id: output for output in engine.step() if output.finished
            }
            steps += bool(scheduler(llm).running)
            assert steps < 200, "no progress"
        for output in done.values():
            [completion] = output.outputs
            assert re.fullmatch(regex, completion.text)
            assert completion.finish_reason == "stop"
