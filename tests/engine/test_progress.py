"""Every request ends, whatever runs beside it: few pages, urgent requests, long queues."""

from itertools import pairwise
from statistics import median
from time import thread_time
from typing import Any

import pytest
from engines import (
    EngineRoom,
    a_prompt,
    forwards,
    free_pages,
    num_preemptions,
    params,
    scheduler,
    token_ids,
)
from full_jobs import FullJob, run, start
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

pytestmark = pytest.mark.slow

DECODERS = [
    ("llada", "dual_cache"),
    ("dream", "prefix_cache"),
    ("llada", "semi_autoregressive"),
]
each_decoder = pytest.mark.parametrize(
    "decoder", DECODERS, ids="-".join, scope="module"
)
NUMBERS = {"policy": "low_confidence", "steps": 4, "block_length": 16}
PAGES = {"canvas": 32, "block_size": 32}
URGENT, USUAL = 0, 9


def whole_text(index: int, tokens: int = 96) -> FullJob:
    """A request of four pages at its end."""
    return FullJob(a_prompt(24 + index % 3, index), tokens, NUMBERS)


@each_decoder
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_forwards_with_pages_for_one_and_a_half(
    decoder: tuple[str, str], policy: str, room: EngineRoom
) -> None:
    """What preemptions repeat is bounded, and texts stay their own."""
    options = PAGES | {"num_gpu_blocks_override": 7, "scheduling_policy": policy}
    llm = start(room, decoder, **options)
    before, pages = num_preemptions(llm), free_pages(llm)
    jobs = [whole_text(i) for i in range(8)]
    outputs = run(llm, jobs)
    texts = [job.decode(decoder, canvas=32) for job in jobs]
    assert [token_ids(output) for output in outputs] == [
        text.answer() for text in texts
    ]
    assert num_preemptions(llm) > before and free_pages(llm) == pages
    undisturbed = sum(len(text.forwards) for text in texts)
    assert sum(map(forwards, outputs)) <= 3 * undisturbed


@each_decoder
def test_a_usual_request_among_urgent_ones(
    decoder: tuple[str, str], room: EngineRoom
) -> None:
    """A new urgent one comes whenever one ends, and takes pages of the usual one as it grows."""
    options = PAGES | {"num_gpu_blocks_override": 5, "max_model_len": 128}
    llm = start(room, decoder, scheduling_policy="priority", **options)
    engine, pages = llm.llm_engine, free_pages(llm)
    # Both begin with two of four pages; an urgent one needs a third behind its second block.
    usual, urgent = whole_text(1, tokens=64), whole_text(2, tokens=40)
    engine.add_request(
        "usual", {"prompt_token_ids": usual.prompt}, usual.wish(), priority=USUAL
    )
    text, lasts = (
        usual.decode(decoder, canvas=32),
        len(urgent.decode(decoder, canvas=32).forwards),
    )
    done: dict[str, Any] = {}
    came, before = 0, num_preemptions(llm)
    for _ in range(20 * lasts):
        if len(done) == came:
            prompt = {"prompt_token_ids": urgent.prompt}
            engine.add_request(f"urgent {came}", prompt, urgent.wish(), priority=URGENT)
            came += 1
        done |= {
            output.request_id: output for output in engine.step() if output.finished
        }
        if "usual" in done:
            break
    assert "usual" in done, f"{came} urgent requests went by"
    assert num_preemptions(llm) > before and token_ids(done["usual"]) == text.answer()
    engine.abort_request([f"urgent {i}" for i in range(came)])
    engine.step()
    assert free_pages(llm) == pages


@pytest.mark.parametrize("ahead", [False, True])
def test_a_guided_request_among_urgent_ones(ahead: bool, room: EngineRoom) -> None:
    """Both requests of its pair become urgent together: half of it in front holds others up."""
    decoder = ("llada", "semi_autoregressive")
    options = PAGES | {"num_gpu_blocks_override": 7, "max_model_len": 128}
    options |= {"async_scheduling": ahead}
    llm = start(room, decoder, scheduling_policy="priority", **options)
    engine, core, pages = llm.llm_engine, scheduler(llm), free_pages(llm)
    guided = FullJob(a_prompt(25, 1), 64, NUMBERS | {"cfg_scale": 0.7})
    urgent = whole_text(2, tokens=40)
    engine.add_request(
        "guided", {"prompt_token_ids": guided.prompt}, guided.wish(), priority=USUAL
    )
    done: dict[str, Any] = {}
    came = preempted = 0
    while "guided" not in done and came < 20:
        if len(done) == came:
            prompt = {"prompt_token_ids": urgent.prompt}
            engine.add_request(f"urgent {came}", prompt, urgent.wish(), priority=URGENT)
            came += 1
        done |= {
            output.request_id: output for output in engine.step() if output.finished
        }
        pairs = [r for r in core.requests.values() if "guided" in r.request_id]
        assert len({request.priority for request in pairs}) <= 1
        preempted = max(preempted, *(request.num_preemptions for request in pairs), 0)
    assert (
        preempted
        and token_ids(done["guided"]) == guided.decode(decoder, canvas=32).answer()
    )
    engine.abort_request([f"urgent {i}" for i in range(came)])
    engine.step()
    assert free_pages(llm) == pages


@pytest.mark.parametrize(
    "decoder", [DECODERS[0], ("sdar", "block_diffusion")], ids="-".join
)
def test_who_may_not_enter_holds_up_those_after(
    decoder: tuple[str, str], room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the end of the step, in a loop like that of vLLM 0.33 too, which skips who is refused.

    They would overtake it for ever, and each of ten thousand would be asked in every step.
    """
    family, strategy = decoder
    dllm = {"strategy": strategy} | ({"canvas_length": 48} if family == "llada" else {})
    llm = room.start(
        family, dllm, max_model_len=160, max_num_batched_tokens=160, max_num_seqs=4
    )
    engine, core, pages = llm.llm_engine, scheduler(llm), free_pages(llm)
    prompts = [a_prompt(length, 1) for length in (70, 90, 2, 2)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params(40))
    most, asked, budget = (
        core.max_num_active_reqs,
        list[str](),
        core.max_num_scheduled_tokens,
    )

    def skip_refused(core: Any, throttle_prefills: bool = False) -> SchedulerOutput:
        left = budget
        for request in core.waiting:
            if len(core.running) >= core.max_num_active_reqs:
                break
            asked.append(request.request_id.partition("-")[0])
            # Room for less than a block of the second prompt is none.
            wanted = min(request.num_tokens, left)
            left -= core._reserve_prefill_lookahead(request, 0, wanted)
            left = min(left, 2)
        return SchedulerOutput.make_empty()

    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "schedule", skip_refused)
        for _ in range(3):
            asked.clear()
            core.schedule()
            assert asked == ["0", "1"], "and nobody behind the first who is refused"
            assert core.max_num_active_reqs == most > 0, "the next step asks again"
    plain, entered = core.schedule, list[str]()

    def noted(*args: Any) -> SchedulerOutput:
        output = plain(*args)
        entered.extend(r.req_id.partition("-")[0] for r in output.scheduled_new_reqs)
        return output

    monkeypatch.setattr(core, "schedule", noted)
    while engine.has_unfinished_requests():
        engine.step()
    assert entered == ["0", "1", "2", "3"] and free_pages(llm) == pages


LONG, SLOTS = 10_000, 64


def pace() -> float:
    """Return the seconds of a fixed loop: what shares the core slows it as it slows a step."""
    began = thread_time()
    for _ in range(100_000):
        pass
    return thread_time() - began


@pytest.mark.parametrize("strategy", ["d2f", "dual_cache"])
def test_a_long_queue_costs_no_step_time(
    strategy: str, room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand wait: steps are scheduled as fast as with a tenth of them, in their order."""
    dllm = {"strategy": strategy, "canvas_length": 32}
    llm = room.start("llada", dllm, max_num_seqs=SLOTS, max_model_len=128)
    engine, core, pages = llm.llm_engine, scheduler(llm), free_pages(llm)
    wish = params(4, dllm_block_length=4, dllm_threshold=0.0)
    costs: dict[str, list[float]] = {"long": [], "short": []}
    plain = core.schedule

    def timed(*args: Any, **kwargs: Any) -> Any:
        waiting, began = len(core.waiting), thread_time()
        output = plain(*args, **kwargs)
        took = thread_time() - began
        if waiting > LONG // 2:
            costs["long"].append(took / pace())
        elif SLOTS < waiting < LONG // 10:
            costs["short"].append(took / pace())
        return output

    monkeypatch.setattr(core, "schedule", timed)
    for i in range(LONG):
        engine.add_request(str(i), {"prompt_token_ids": [i % 250] * (1 + i % 3)}, wish)
    order: list[int] = []
    gone = range(0)
    while engine.has_unfinished_requests():
        order += [int(output.request_id) for output in engine.step() if output.finished]
        if len(costs["long"]) == 24 and not gone:
            gone = range(order[-1] + 3 * SLOTS, LONG - LONG // 10)
            engine.abort_request([str(i) for i in gone])
    assert len(order) == LONG - len(gone)
    places = [i for i in range(LONG) if i not in gone]
    apart = [abs(place - places.index(i)) for place, i in enumerate(order)]
    assert max(apart) < 3 * SLOTS
    assert min(map(len, costs.values())) >= 10
    # A step that admits requests may alternate with one that does not: of two each.
    long, short = (median(map(sum, pairwise(steps))) for steps in costs.values())
    assert long < 1.5 * short
    assert free_pages(llm) == pages and not core.requests and not core.records
