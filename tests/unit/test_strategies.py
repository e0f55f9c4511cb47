"""Strategies, states and sampler in the loop, against recorded traces and the plain loops."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Loop, Pass, Run, sampling
from scripted_rows import EOS, MASK, Hashed, Script, Table

GOLDENS = Path(__file__).parents[1] / "goldens"
SCENARIOS: dict[str, dict[str, Any]] = {
    s["name"]: s for s in json.loads((GOLDENS / "d2f_scripted.json").read_text())
}
NAMES = list(SCENARIOS)
ROOMY = {
    "strategy": "d2f",
    "block_length": 4,
    "canvas_length": 32,
    "max_active_blocks": 8,
}


def table(scenario: dict[str, Any]) -> Table:
    tokens, probabilities = scenario["tokens"], scenario["probabilities"]
    pairs = [tuple(p) if isinstance(p, list) else p for p in probabilities]
    # What lies behind the last open block is computed too, and never read.
    return Table(lambda q: tokens[min(q, 23)], lambda q: pairs[min(q, 23)])


def begin(loop: Loop, name: str, **options: Any) -> Run:
    s = SCENARIOS[name]
    params = sampling(
        s["max_tokens"],
        dllm_block_length=s["block_length"],
        dllm_policy=s["ranking"],
        dllm_threshold=s["conf"],
        dllm_block_add_threshold=s["add"],
        dllm_decoded_token_threshold=s["act"],
        **options,
    )
    return loop.start(s["prompt"], table(s), params, req_id=name)


def expected_passes(scenario: dict[str, Any]) -> list[Pass]:
    """Recorded passes; ours runs the prompt by itself before the first of them."""
    prompt, passes = len(scenario["prompt"]), []
    for p in scenario["passes"]:
        commit = p["commit"] - (prompt if p["lo"] == 0 else 0)
        accepted = [tuple(pair) for pair in p["accepted"]]
        passes.append(
            Pass(
                max(p["lo"], prompt),
                p["hi"],
                commit,
                p["full"],
                accepted,
                p["saw_stop"],
                [],
            )
        )
    return passes


def check_scenario(run: Run) -> None:
    scenario = SCENARIOS[run.req_id]
    expected, taken = (
        expected_passes(scenario),
        [p._replace(emitted=[]) for p in run.passes],
    )
    assert taken == expected[: len(taken)]
    assert [t for t in run.output if t != EOS] == scenario["trimmed"]
    saw_stop = any(p.saw_stop for p in expected)
    # With a stop token the text can be final before every open block is.
    assert saw_stop or len(taken) == len(expected)
    if run.output[-1] != EOS:
        assert len(run.output) == scenario["max_tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_scenario_alone(name: str) -> None:
    loop = Loop(ROOMY, shift=SCENARIOS[name]["shift"])
    run = begin(loop, name)
    loop.run()
    check_scenario(run)


def test_early_exit_passes() -> None:
    loop = Loop(ROOMY)
    runs = [begin(loop, name) for name in ("S5", "S6")]
    loop.run()
    assert [len(run.passes) for run in runs] == [3, 4]


@pytest.mark.parametrize("stagger,chunk", [(0, 4096), (1, 7)])
def test_scenarios_in_one_batch(stagger: int, chunk: int) -> None:
    """Neighbours in other phases, with other block lengths, change nothing."""
    names = [name for name in NAMES if not SCENARIOS[name]["shift"]]
    loop, runs = Loop(ROOMY, slots=48, rows_at_once=chunk), []
    for i, name in enumerate(names):
        runs.append(begin(loop, name))
        params = sampling(9, dllm_block_length=(1, 2, 3, 8)[i % 4])
        loop.start([1] * (i % 5 + 1), Hashed(i), params, req_id=f"neighbour-{i}")
        for _ in range(stagger):
            loop.step()
    loop.run()
    for run in runs:
        check_scenario(run)


@pytest.mark.parametrize("when", range(8))
@pytest.mark.parametrize("name", ["S3", "S4", "S12"])
def test_preempted_request_takes_the_same_passes(name: str, when: int) -> None:
    loop = Loop(ROOMY, shift=SCENARIOS[name]["shift"])
    other = loop.start([2, 2], Hashed(1), sampling(20))
    run = begin(loop, name)
    for _ in range(when + 1):
        if not run.done:
            loop.step()
    if not run.done:
        loop.preempt(run)
        loop.step()
        loop.resume(run)
    loop.run()
    check_scenario(run)
    assert other.done


def test_a_reused_request_id_starts_afresh() -> None:
    """What a finished request left behind must not reach a later one of the same name."""
    loop = Loop(ROOMY)
    for _ in range(2):
        run = begin(loop, "S1")
        loop.run(limit=50)
        check_scenario(run)


def test_an_ended_request_in_flight_emits_nothing() -> None:
    """Asynchronous scheduling runs one more step before the host learns of the end."""
    loop = Loop(ROOMY)
    run = begin(loop, "S5")
    loop.run()
    states = loop.states
    loop.resume(run)
    slot = run.slot
    run.prefilled = True
    states.ended_N[slot] = True
    batch = loop.batch([run], [loop.canvas_length], [])
    output = loop.sampler(torch.zeros(loop.canvas_length, 16), batch)
    assert int(output.num_sampled[0]) == 0
    assert int(output.num_rejected[0]) == loop.canvas_length


def certain(token: int) -> Script:
    return Table(lambda q: token, lambda q: 0.99)


def count(q: int) -> int:
    return q % 13


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_max_tokens_is_exact(max_tokens: int, shift: bool) -> None:
    """Whole blocks are decoded and trimmed; also fewer tokens than a block, and S7a's ten."""
    loop = Loop(ROOMY, shift=shift)
    run = loop.start([1] * 4, Table(count, lambda q: 0.99), sampling(max_tokens))
    loop.run()
    assert run.output == [count(q) for q in range(4, 4 + max_tokens)]
    assert len(run.passes) == -(-max_tokens // 4)


def test_prompt_with_stop_token_changes_nothing() -> None:
    """S17; a prompt with the mask token is refused at admission."""
    loop = Loop(ROOMY)
    script = Table(count, lambda q: 0.99)
    run = loop.start([EOS, 3, EOS], script, sampling(6))
    loop.run()
    assert run.output == [3, 4, 5, 6, 7, 8]
    assert not any(p.saw_stop for p in run.passes)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.99}])
def test_a_single_candidate_is_certain(filters: dict[str, Any]) -> None:
    """S18: filtered to one token, every masked position is taken in its block's first pass."""
    loop = Loop(ROOMY)
    script = Table(count, lambda q: 0.3)
    run = loop.start([1] * 4, script, sampling(12, temperature=0.7, seed=1, **filters))
    loop.run()
    assert run.output == [count(q) for q in range(4, 16)]
    assert [len(p.accepted) for p in run.passes] == [4, 4, 4]


def test_ignore_eos() -> None:
    """S19: an ordinary token; as many blocks as asked for."""
    loop = Loop(ROOMY)
    run = loop.start([1] * 4, certain(EOS), sampling(10, ignore_eos=True))
    stopping = loop.start([1] * 4, certain(EOS), sampling(10))
    loop.run()
    assert run.output == [EOS] * 10 and len(run.passes) == 3
    assert stopping.output == [EOS] and len(stopping.passes) == 1


def test_context_ends_inside_a_block() -> None:
    """S20: the last block is as short as the context makes it."""
    loop = Loop(ROOMY | {"canvas_length": 8}, max_model_len=12)
    run = loop.start([1] * 6, Table(count, lambda q: 0.5), sampling(16))
    loop.run()
    assert run.output == [count(q) for q in range(6, 12)]
    assert run.passes[-1].hi == 12


def test_stop_token_ids_end_a_request() -> None:
    loop = Loop(ROOMY)
    script = Table(count, lambda q: 0.99)
    run = loop.start([1] * 4, script, sampling(16, stop_token_ids=[9, 11]))
    loop.run()
    assert run.output == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("strategy", ["d2f", "block_diffusion"])
def test_emitted_text_never_changes(strategy: str) -> None:
    """S22: pieces are decided when emitted, in order, and add up to the text."""
    loop = Loop({"strategy": strategy, "block_length": 4, "canvas_length": 16})
    script = Hashed(77)
    run = loop.start(
        [5, 6, 7], script, sampling(24, ignore_eos=True, dllm_threshold=0.6)
    )
    loop.run()
    assert sum((p.emitted for p in run.passes), []) == run.output
    assert len(run.output) == 24 and MASK not in run.output
    decided: dict[int, int] = {}
    for p in run.passes:
        decided |= dict(p.accepted)
    assert run.output == [decided[q] for q in range(3, 27)]


def test_stop_token_that_is_the_mask_token_does_not_hang() -> None:
    """Undecided positions hold the mask id, which is no sign of an end."""
    loop = Loop(ROOMY)
    script = Table(count, lambda q: 0.99)
    run = loop.start([1] * 4, script, sampling(12, stop_token_ids=[MASK]))
    loop.run(limit=50)
    assert run.output == [count(q) for q in range(4, 16)]


def test_a_canvas_of_one_block_costs_a_pass_per_block() -> None:
    """Nothing rides along where nothing fits; the text is the same."""
    script, params = Table(count, lambda q: 0.5), sampling(12, dllm_threshold=0.9)
    texts, passes = [], []
    for canvas in (4, 8):
        dllm = {
            "strategy": "block_diffusion",
            "block_length": 4,
            "canvas_length": canvas,
        }
        loop = Loop(dllm)
        run = loop.start([1] * 3, script, params)
        loop.run()
        texts.append(run.output)
        passes.append(len(run.passes))
    assert texts[0] == texts[1] and passes == [14, 12]
