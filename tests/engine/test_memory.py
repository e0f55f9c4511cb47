"""Pages: their borders, preemption when they run out, and that all of them come back."""

from typing import Any

import pytest
from engines import (
    EngineRoom,
    forwards,
    free_pages,
    generate,
    num_preemptions,
    params,
    step_through,
    token_ids,
)
from jobs import MIXED, check, job


def test_preemption_under_pressure(family: str, overlapped: bool, room: EngineRoom) -> None:
    llm = room.start(family, async_scheduling=overlapped, block_size=32, num_gpu_blocks_override=14)
    before, pages = num_preemptions(llm), free_pages(llm)
    check(llm, family, [*MIXED, job(50, 100, 16, seed=8), job(55, 100, 16, seed=9)])
    assert num_preemptions(llm) > before
    assert free_pages(llm) == pages


@pytest.mark.parametrize("every", [2, 3, 7])
def test_preemption_after_every_few_steps(family: str, every: int, room: EngineRoom) -> None:
    """E4: with 2, each denoising step is followed by a preemption."""
    llm = room.start(family, block_size=32)
    engine, jobs = llm.llm_engine, [MIXED[1], MIXED[2]]
    for i, one in enumerate(jobs):
        engine.add_request(str(i), {"prompt_token_ids": list(one.prompt)}, one.wish())
    before, step, done = num_preemptions(llm), 0, {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
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
    exact = [job(page - 16, 48, 16, seed=page), job(page - 6, 40, 8, seed=page, threshold=0.3)]
    check(llm, family, [*around, *exact])


def test_abort_gives_every_page_back(overlapped: bool, room: EngineRoom) -> None:
    """E13: aborted while waiting, while prefilled and in the middle of its canvas."""
    llm = room.start("llada", async_scheduling=overlapped, block_size=32, max_num_seqs=4)
    engine, pages = llm.llm_engine, free_pages(llm)
    for steps in (0, 1, 2, 5):
        for i, one in enumerate(MIXED[:6]):
            engine.add_request(str(i), {"prompt_token_ids": list(one.prompt)}, one.wish())
        for _ in range(steps):
            engine.step()
        engine.abort_request([str(i) for i in range(6)])
        for _ in range(3):
            engine.step()
        assert not engine.has_unfinished_requests()
        assert free_pages(llm) == pages, steps
    check(llm, "llada", MIXED[:2])


def test_an_id_that_was_used_before(overlapped: bool, room: EngineRoom) -> None:
    """Nothing of an aborted request comes back with the next one of its name and length."""
    llm = room.start("llada", async_scheduling=overlapped, block_size=32, max_num_seqs=4)
    engine, first, second = llm.llm_engine, job(20, 40, seed=1), job(20, 40, seed=2)
    for one, steps in ((first, 4), (second, 100)):
        engine.add_request("same", {"prompt_token_ids": list(one.prompt)}, one.wish())
        for _ in range(steps):
            outputs = [o for o in engine.step() if o.finished]
            if outputs:
                assert (token_ids(outputs[0]), forwards(outputs[0])) == second.expected("llada")
        engine.abort_request(["same"])
    assert not engine.has_unfinished_requests()


def test_every_way_to_end_gives_every_page_back(overlapped: bool, room: EngineRoom) -> None:
    """E13: by length, by a stop token, by a stop string, one after the other and at once."""
    llm = room.start("llada", async_scheduling=overlapped, block_size=32, max_num_seqs=4)
    pages, one = free_pages(llm), MIXED[3]
    answer = one.expected("llada")[0]
    text = llm.get_tokenizer().decode(answer)
    wishes: list[Any] = [
        one.wish(),
        params(96, stop_token_ids=[answer[40]], dllm_block_length=32, dllm_threshold=0.6),
        params(96, stop=[text[-9:-5]], dllm_block_length=32, dllm_threshold=0.6),
    ]
    for group in ([wishes[0]], [wishes[1]], [wishes[2]], wishes):
        generate(llm, [list(one.prompt)] * len(group), group)
        assert free_pages(llm) == pages
    step_through(llm, {0: [("a", list(one.prompt), wishes[1])], 3: [("b", [5], wishes[0])]})
    assert free_pages(llm) == pages
