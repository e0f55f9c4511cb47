"""Pages: their borders, preemption when they run out, and that all of them come back."""

import itertools
import time
from typing import Any

import pytest
from engines import (
    EngineRoom,
    abort_often,
    canvas_states,
    forwards,
    free_pages,
    generate,
    num_preemptions,
    params,
    scheduler,
    step_through,
    token_ids,
)
from held import Held, held
from jobs import MIXED, check, job
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.slow


def test_preemption_under_pressure(
    family: str, overlapped: bool, room: EngineRoom
) -> None:
    llm = room.start(
        family, async_scheduling=overlapped, block_size=32, num_gpu_blocks_override=14
    )
    before, pages = num_preemptions(llm), free_pages(llm)
    check(llm, family, [*MIXED, job(50, 100, 16, seed=8), job(55, 100, 16, seed=9)])
    assert num_preemptions(llm) > before
    assert free_pages(llm) == pages


def test_a_clock_that_jumps(
    overlapped: bool, room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour to and fro: what is decided, and who is preempted, hangs on no clock."""
    llm = room.start(
        "llada", async_scheduling=overlapped, block_size=32, num_gpu_blocks_override=14
    )
    before, now, hours = num_preemptions(llm), time.time, itertools.cycle((0, 1, -1))
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * next(hours))
    check(llm, "llada", [*MIXED, job(50, 100, 16, seed=8), job(55, 100, 16, seed=9)])
    assert num_preemptions(llm) > before


@pytest.mark.parametrize("every", [2, 3, 7])
def test_preemption_after_every_few_steps(
    family: str, every: int, room: EngineRoom
) -> None:
    """E4: with 2, each denoising step is followed by a preemption."""
    llm = room.start(family, block_size=32)
    engine, jobs = llm.llm_engine, [MIXED[1], MIXED[2]]
    for i, one in enumerate(jobs):
        engine.add_request(str(i), {"prompt_token_ids": list(one.prompt)}, one.wish())
    before, step, done = num_preemptions(llm), 0, {}
    while engine.has_unfinished_requests():
        done |= {
            output.request_id: output for output in engine.step() if output.finished
        }
        step += 1
        if step % every == 0:
            llm.reset_prefix_cache(reset_running_requests=True)
    assert num_preemptions(llm) - before > step // every
    for i, one in enumerate(jobs):
        got = token_ids(done[str(i)]), forwards(done[str(i)])
        assert got == one.expected(family), one


@pytest.mark.parametrize("page", [32, 64, 128])
def test_page_borders(family: str, page: int, room: EngineRoom) -> None:
    """E2, E3: prompts that end around a page, blocks and multiple commits that cross one."""
    llm = room.start(family, block_size=page)
    assert llm.llm_engine.vllm_config.cache_config.block_size == page
    around = [job(page + d, 64, 16, seed=page + d, threshold=0.5) for d in (-1, 0, 1)]
    exact = [
        job(page - 16, 48, 16, seed=page),
        job(page - 6, 40, 8, seed=page, threshold=0.3),
    ]
    check(llm, family, [*around, *exact])


def test_abort_gives_every_page_back(overlapped: bool, room: EngineRoom) -> None:
    """E13: aborted while waiting, while prefilled and in the middle of its canvas."""
    llm = room.start(
        "llada", async_scheduling=overlapped, block_size=32, max_num_seqs=4
    )
    abort_often(llm, [(list(one.prompt), one.wish()) for one in MIXED[:6]])
    check(llm, "llada", MIXED[:2])


def test_an_id_that_was_used_before(overlapped: bool, room: EngineRoom) -> None:
    """Nothing of an aborted request comes back with the next one of its name and length."""
    llm = room.start(
        "llada", async_scheduling=overlapped, block_size=32, max_num_seqs=4
    )
    engine, first, second = llm.llm_engine, job(20, 40, seed=1), job(20, 40, seed=2)
    for one, steps in ((first, 4), (second, 100)):
        engine.add_request("same", {"prompt_token_ids": list(one.prompt)}, one.wish())
        for _ in range(steps):
            outputs = [o for o in engine.step() if o.finished]
            if outputs:
                assert (token_ids(outputs[0]), forwards(outputs[0])) == second.expected(
                    "llada"
                )
        engine.abort_request(["same"])
    assert not engine.has_unfinished_requests()


def test_every_way_to_end_gives_every_page_back(
    overlapped: bool, room: EngineRoom
) -> None:
    """E13: by length, by a stop token, by a stop string, one after the other and at once."""
    llm = room.start(
        "llada", async_scheduling=overlapped, block_size=32, max_num_seqs=4
    )
    pages, one = free_pages(llm), MIXED[3]
    answer = one.expected("llada")[0]
    text = llm.get_tokenizer().decode(answer)
    wishes: list[Any] = [
        one.wish(),
        params(
            96, stop_token_ids=[answer[40]], dllm_block_length=32, dllm_threshold=0.6
        ),
        params(96, stop=[text[-9:-5]], dllm_block_length=32, dllm_threshold=0.6),
    ]
    for group in ([wishes[0]], [wishes[1]], [wishes[2]], wishes):
        generate(llm, [list(one.prompt)] * len(group), group)
        assert free_pages(llm) == pages
    step_through(
        llm, {0: [("a", list(one.prompt), wishes[1])], 3: [("b", [5], wishes[0])]}
    )
    assert free_pages(llm) == pages


@pytest.mark.parametrize(
    "overlapped",
    [False, True],
    ids=["sync", "async"],
)
def test_finished_requests_leave_nothing_on_the_worker(
    overlapped: bool, room: EngineRoom
) -> None:
    """Many that end by length, stop token or abort, in any state, most preempted before."""
    dllm = {"strategy": "d2f", "block_length": 8, "canvas_length": 16}
    tight: Any = {"block_size": 32, "num_gpu_blocks_override": 9}
    llm = room.start("llada", dllm, async_scheduling=overlapped, **tight)
    before, pages, held_after = num_preemptions(llm), free_pages(llm), list[Held]()
    for part in range(3):
        many_short_requests(llm, part)
        states = canvas_states(llm)
        assert not states.req_id_to_slot and not states.preempted._kept
        # A dictionary that was emptied keeps its size, which is that of the most it had.
        states.req_id_to_slot, states.preempted._kept = {}, {}
        held_after.append(held(states, states.config, states.model_config))
        assert free_pages(llm) == pages
    assert num_preemptions(llm) - before > 30
    assert held_after[0] == held_after[1] == held_after[2]


def many_short_requests(llm: Any, part: int, count: int = 50) -> None:
    """Keep ten requests in the engine until `count` have come and gone; abort every seventh."""
    engine, core, states, started = (
        llm.llm_engine,
        scheduler(llm),
        canvas_states(llm),
        0,
    )
    step = 0
    while started < count or engine.has_unfinished_requests():
        while started < count and len(core.requests) < 10:
            one = job(15 + 7 * started % 20, 10 + started % 16, seed=started)
            stops = {"stop_token_ids": [0, 2, 5, 9]} if started % 3 == 0 else {}
            scores = {"logprobs": 2} if started % 5 == 0 else {}
            wish = params(one.max_tokens, **stops, **scores)
            engine.add_request(
                f"{part}-{started}", {"prompt_token_ids": list(one.prompt)}, wish
            )
            started += 1
        engine.step()
        step += 1
        # Between two steps, so that the worker hears of preemptions and aborts at once.
        if step % 5 == 0:
            llm.reset_prefix_cache(reset_running_requests=True)
        waiting = {
            i for i, r in core.requests.items() if r.status == RequestStatus.PREEMPTED
        }
        assert states.preempted._kept.keys() <= waiting
        chosen = [i for i in core.requests if int(i.split("-")[1]) % 7 == 3]
        preempted = [i for i in chosen if i in waiting]
        engine.abort_request(preempted or chosen[:1], internal=True)
    engine.step()  # nobody is left: it tells the worker who came last
