"""Rows are kept of preempted requests and of nobody else, whatever else leaves its slot."""

import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
from held import Held, held
from scripted import Loop, Run, sampling
from scripted_rows import Hashed
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dllm_plugin.config.worker_carriers import (
    FINISHED,
    PREEMPTED,
    pack_departures,
    pack_id,
    unpack_id,
)
from dllm_plugin.state.canvas_states import PREEMPTED_PER_SLOT, CanvasStates

D2F = {"strategy": "d2f", "block_length": 4, "canvas_length": 8}
SLOTS = 8


def measure(states: CanvasStates) -> Held:
    """What the states hold, apart from the configuration."""
    return held(states, states.config, states.model_config)


def start(states: CanvasStates, req_id: str, slot: int, output: int = 0) -> None:
    """Add a request with a prompt of its own, as vLLM's runner does."""
    prompt = [1000 + len(req_id)] * 20
    text, params = prompt + [7] * output, sampling(30, logprobs=2)
    states.remove_request(req_id)
    states.add_request(
        slot,
        NewRequestData(
            req_id, prompt, [], params, None, ((),), 0, None, None, None, text
        ),
    )


def pass_through(
    states: CanvasStates, first: int, last: int, how: str = "finished"
) -> None:
    """Start and end the requests `first` to `last`, a full batch at a time."""
    for batch in range(first, last, SLOTS):
        names = [f"request-{i:05}" for i in range(batch, min(batch + SLOTS, last))]
        for slot, name in enumerate(names):
            start(states, name, slot)
        states.apply_staged_writes()
        for name in names if how != "finished" else ():
            states.remove_request(pack_id(name, PREEMPTED))
        if how == "came back":
            for slot, name in enumerate(reversed(names)):
                start(states, name, slot)
            states.apply_staged_writes()
        for name in names:
            states.remove_request(pack_id(name, FINISHED))


@pytest.mark.parametrize("how", ["finished", "came back", "aborted while waiting"])
def test_ten_thousand_requests_leave_what_one_thousand_left(how: str) -> None:
    """As much as the first batch; a tenth of them where rows are copied."""
    states, count = Loop(D2F, slots=SLOTS).states, 1000 if how == "finished" else 100
    measured = []
    for first, last in ((0, SLOTS), (SLOTS, count), (count, 10 * count)):
        pass_through(states, first, last, how)
        measured.append(measure(states))
    assert measured[0] == measured[1] == measured[2]


def test_the_count_sees_a_request_that_stays() -> None:
    states = Loop(D2F, slots=SLOTS).states
    pass_through(states, 0, 100, "came back")
    before = measure(states)
    start(states, "stays", 0)
    states.apply_staged_writes()
    states.remove_request(pack_id("stays", PREEMPTED))
    after = measure(states)
    assert (
        after.objects > before.objects + 10 and after.num_bytes > before.num_bytes + 100
    )
    states.remove_request(pack_id("stays", FINISHED))
    assert measure(states) == before


def test_requests_of_the_warm_up_leave_nothing() -> None:
    """vLLM runs some past our scheduler; their ids are plain."""
    states = Loop(D2F, slots=SLOTS).states
    start(states, "warm-up", 0)
    states.apply_staged_writes()
    states.remove_request("warm-up")
    assert kept(states) == set()


def kept(states: CanvasStates) -> set[str]:
    return set(states.preempted._kept)


@pytest.mark.parametrize("seed", range(4))
def test_only_preempted_requests_are_kept(seed: int) -> None:
    """Random arrivals, preemptions, returns and aborts; texts and steps are those without."""
    dice = random.Random(seed)
    loop, waiting, aborted = Loop(D2F, slots=SLOTS), list[Run](), set[str]()
    runs: list[Run] = []
    for step in range(120):
        while loop.free and step < 60 and dice.random() < 0.4:
            i = len(runs)
            prompt = [i % 13] * (1 + i % 5)
            runs.append(
                loop.start(prompt, Hashed(i), sampling(4 + i % 9), f"request-{i}")
            )
        while loop.free and waiting and dice.random() < 0.5:
            loop.resume(waiting.pop())
        if not loop.running and not waiting and step >= 60:
            break
        if loop.running:
            loop.step()
        for run in list(loop.running):
            if dice.random() < 0.2:
                loop.preempt(run)
                waiting.append(run)
            elif dice.random() < 0.03:
                loop.finish(run)
                aborted.add(run.req_id)
        for run in list(waiting):
            if dice.random() < 0.1:
                loop.finish(run)
                waiting.remove(run)
                aborted.add(run.req_id)
        assert kept(loop.states) == {run.req_id for run in waiting}
    assert not waiting and not loop.running and len(runs) > 20 and aborted
    for i, run in enumerate(runs):
        if run.req_id not in aborted:
            alone = Loop(D2F)
            again = alone.start(run.prompt, Hashed(i), run.params)
            alone.run()
            assert (run.output, run.passes) == (again.output, again.passes)
            assert run.broken == 0  # rows that nobody asked for are NaN there


def test_a_reused_id_finds_nothing_of_the_one_before() -> None:
    """Aborted while it waited to come back; the next one has the same text so far."""
    loop = Loop(D2F)
    script, params = Hashed(3), sampling(20, None)
    first = loop.start([1, 2, 3], script, params, "same")
    for _ in range(2):
        loop.step()
    loop.preempt(first)
    loop.finish(first)
    second = loop.start([1, 2, 3], script, params, "same")
    alone = Loop(D2F)
    expected = alone.start([1, 2, 3], script, params, "same")
    for one in (loop, alone):
        one.run()
    assert second.passes == expected.passes and second.output == expected.output


@pytest.mark.parametrize(
    "dllm", [{"strategy": "dual_cache"}, {"strategy": "semi_autoregressive"}]
)
def test_full_attention_keeps_nothing(dllm: dict[str, Any]) -> None:
    """Its open block starts again."""
    states = Loop({"block_length": 4, "canvas_length": 16} | dllm).states
    start(states, "one", 0)
    states.remove_request(pack_id("one", PREEMPTED))
    assert kept(states) == set()


def test_more_than_can_wait_are_not_kept() -> None:
    """Priorities let more requests wait than there are slots; the first ones start again."""
    states, count = Loop(D2F, slots=1).states, PREEMPTED_PER_SLOT + 3
    for i in range(count):
        start(states, str(i), 0)
        states.apply_staged_writes()
        states.remove_request(pack_id(str(i), PREEMPTED))
    assert kept(states) == {str(i) for i in range(3, count)}


# How the worker learns who was preempted.


def removals(finished: set[str], preempted: set[str]) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.finished_req_ids, output.preempted_req_ids = finished, preempted
    pack_departures(output, {})
    return output


def test_ids_reach_the_state_as_they_were_sent() -> None:
    """Through vLLM's runner, in its order, and through the pickle that its worker processes get."""
    output = pickle.loads(pickle.dumps(removals({"b", "c"}, {"a", "c"})))
    got: list[str] = []
    runner: Any = SimpleNamespace(pooling_runner=None, _remove_request=got.append)
    GPUModelRunner.finish_requests(runner, output)
    assert [(unpack_id(i)[0], i) for i in got] == [
        (PREEMPTED, "a"),
        (FINISHED, "b"),
        (FINISHED, "c"),  # preempted and then aborted
    ]


def test_steps_that_remove_nobody_are_left_alone() -> None:
    finished, preempted = set[str](), set[str]()
    output = removals(finished, preempted)
    assert output.finished_req_ids is finished and output.preempted_req_ids is preempted


def test_marked_ids_are_ids() -> None:
    for marked in (pack_id("x", PREEMPTED), pack_id("x", FINISHED)):
        assert marked == "x" and {marked: 1}["x"] == 1 and f"{marked}" == "x"
