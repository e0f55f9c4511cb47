"""Lengths of drafts by load and acceptance: they change the number of forwards, never a text."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import (
    EngineRoom,
    a_prompt,
    canvas_states,
    forwards,
    generate,
    letters,
    params,
    scheduler,
    token_ids,
)
from mixed import Counted, fresh_compiler
from torch._dynamo.utils import counters

from dllm_plugin.config.carriers import unpack_drafts
from dllm_plugin.decoding.step_costs import Costs

pytestmark = pytest.mark.slow

ENGINES = {
    "nemotron": {"strategy": "self_speculation", "block_length": 16},
    "idlm": {"block_length": 8},
}
FREE = Costs()  # of a few requests: drafts cost nothing
DEAR = Costs(free=0, per_position=1.0)  # a forward costs what its positions do
PROMPTS = {"nemotron": letters, "idlm": a_prompt}


@pytest.fixture(params=[("nemotron", True), ("idlm", True), ("idlm", False)], ids=str)
def served(request: pytest.FixtureRequest, room: EngineRoom) -> Iterator[Any]:
    """An engine, and a prompt of each length."""
    name, overlapped = request.param
    llm = room.start(name, ENGINES[name], overlapped)
    controller = scheduler(llm).controller
    before = controller.costs
    prompts = [PROMPTS[name](length, length) for length in (3, 9, 20, 33)]
    yield llm, prompts
    controller.costs = before


def rows(llm: Any) -> dict[int, int]:
    """How many forwards of requests the controller has counted by their rows, without a guess."""
    acceptance = scheduler(llm).controller.acceptance
    places = acceptance.places
    return {width: int(acceptance.steps[place]) for width, place in places.items()}


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"]
)
def test_lengths_change_and_texts_do_not(served: Any, sampling: dict[str, Any]) -> None:
    llm, prompts = served
    controller = scheduler(llm).controller
    one = params(60, dllm_block_length=1, **sampling)
    causal = [token_ids(output) for output in generate(llm, prompts, one)]
    lengths, counted = set(), {}
    for costs in (FREE, DEAR, FREE):
        controller.costs = costs
        changes = controller.changes
        outputs = generate(llm, prompts, params(60, **sampling))
        assert [token_ids(output) for output in outputs] == causal
        counted[costs] = sum(map(forwards, outputs))
        lengths.add(scheduler(llm)._width)
        assert controller.changes > changes or costs is FREE
    assert counted[DEAR] != counted[FREE] and len(lengths) > 1
    assert sum(count > 8 for count in rows(llm).values()) > 1


def test_past_the_break_even_steps_are_causal(served: Any) -> None:
    """A token a forward, of one position each, but for what is tried now and then."""
    llm, prompts = served
    scheduler(llm).controller.costs = DEAR
    generate(llm, prompts, params(40))  # a first choice is made
    positions = scheduler(llm).num_computed_positions
    outputs = generate(llm, prompts, params(60))
    computed = scheduler(llm).num_computed_positions - positions
    tokens = 60 * len(prompts)
    assert 0.9 * tokens <= sum(map(forwards, outputs)) <= 1.1 * tokens
    # Under asynchronous scheduling, a step may be queued when a text ends.
    assert computed <= 1.2 * tokens + sum(map(len, prompts))


def test_a_length_that_is_named_stays(served: Any) -> None:
    """Beside requests whose length changes."""
    llm, prompts = served
    named = params(40, dllm_block_length=4)
    outputs = generate(llm, prompts[:2], named)
    alone = [forwards(output) for output in outputs]
    for output in outputs:
        counts = output.outputs[0].spec_decode_metrics
        drafted, accepted = unpack_drafts(counts)
        rounds = sum(counts.histogram[1:])
        # Each round brings a token beside the drafts that it accepts; the last may bring two.
        assert len(token_ids(output)) - rounds - accepted in (0, 1)
        assert 0 < accepted <= drafted
        judges_all = not canvas_states(llm).config.method.causal_rows
        assert drafted == 3 * rounds if judges_all else drafted < 3 * rounds
    scheduler(llm).controller.costs = DEAR
    outputs = generate(llm, prompts, [named, named, params(40), params(40)])
    assert [forwards(output) for output in outputs[:2]] == alone
    assert min(map(forwards, outputs[2:])) > max(alone)
    assert not scheduler(llm)._own


def test_a_budget_of_thinking_ends_where_it_did(room: EngineRoom) -> None:
    """Its end is that of a draft, so the length of its drafts is the engine's."""
    llm = room.start("nemotron", ENGINES["nemotron"], True)
    names = {"dllm_max_thinking_tokens": 12, "dllm_end_think_token_id": 13}
    fixed = params(40, dllm_block_length=16, **names)
    scheduler(llm).controller.costs = DEAR
    [wanted] = generate(llm, [letters(9, 2)], fixed)
    [output] = generate(llm, [letters(9, 2)], params(40, **names))
    assert token_ids(output) == token_ids(wanted)


def test_other_strategies_choose_no_length(room: EngineRoom) -> None:
    """Their scheduler has no controller, and canvases have one length."""
    llm = room.start("nemotron", {"strategy": "block_diffusion", "block_length": 8})
    [output] = generate(llm, [letters(9)], params(24))
    assert forwards(output) > 0
    assert "controller" not in vars(scheduler(llm))
    assert canvas_states(llm).config.draft_rows == ()


def _serve_every_kind(llm: Any, name: str, prompts: list[list[int]]) -> None:
    """Serve one request and several, with one row each and more, with features and without."""
    length = "dllm_window" if name == "wedlm" else "dllm_block_length"
    short, featured = {length: 1}, {"logprobs": 2, "presence_penalty": 0.5}
    for count in (1, 2, 4, 16):  # the last is the canvas of I-DLM
        for options in ({}, short, featured, featured | short):
            generate(llm, (4 * prompts)[:count], params(12, **options))
    generate(llm, prompts[:2], [params(12, **short), params(12, **featured)])
    if name == "wedlm":
        return
    controller = scheduler(llm).controller
    costs = controller.costs
    for controller.costs in (DEAR, FREE, DEAR):
        generate(llm, prompts[:1], params(24))
    controller.costs = costs


@pytest.mark.parametrize("name", ["nemotron", "idlm", "wedlm"])
def test_compiled_steps_take_the_same_decisions(name: str, room: EngineRoom) -> None:
    """Traced and not translated; nothing is compiled once requests run."""
    llm = room.start(name, ENGINES.get(name, {}), True)
    prompts = [letters(length, length) for length in (3, 9, 20, 33)]
    wish = params(40, temperature=0.6, seed=3)
    plain = [token_ids(output) for output in generate(llm, prompts, wish)]
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    sampler, decider = runner.sampler, runner.sampler.decider
    before = sampler.rows.begin, decider.decide
    with fresh_compiler():
        with torch.inference_mode():
            sampler.compile("eager")
        decider.decide = counted = Counted(decider.decide)
        compiled = counters["stats"]["unique_graphs"]
        outputs = generate(llm, prompts, wish)
        sizes, counted.sizes = counted.sizes, []
        _serve_every_kind(llm, name, prompts)
        assert counters["stats"]["unique_graphs"] == compiled > 0
        assert {1, 2, 4, 16} <= set(counted.sizes)
    sampler.rows.begin, decider.decide = before
    decider.compiled_for = None
    # Only a step with the first tokens of texts has a feature.
    assert len(sizes) > sum(map(forwards, outputs)) / len(prompts) / 2
    assert [token_ids(output) for output in outputs] == plain
