"""Full attention under asynchronous scheduling: forwards are launched before a result is known."""

from typing import Any

import pytest
import torch
from engines import (
    EngineRoom,
    a_prompt,
    at_most,
    free_pages,
    generate,
    num_preemptions,
    scheduler,
    token_ids,
)
from full_goldens import CANVAS
from full_jobs import DECODERS, TOO_CLOSE, Decoder, FullJob, check, random_jobs, run
from full_jobs import start as start_jobs
from mixed import Counted, fresh_compiler
from template_jobs import random_gap_jobs
from test_full_compiled import sampler_of
from test_full_goldens import check as check_case
from test_full_goldens import shuffled, wish_for
from test_full_memory import check_text, small_blocks

CACHED = [decoder for decoder in DECODERS if decoder[1] != "semi_autoregressive"]
every_cached_decoder = pytest.mark.parametrize("decoder", CACHED, ids="-".join, scope="module")
AHEAD = {"async_scheduling": True}


def void(llm: Any) -> int:
    """Forwards that were launched for nothing so far."""
    return int(scheduler(llm).in_flight.num_void)


@every_cached_decoder
@pytest.mark.parametrize("in_flight", [1, pytest.param(4, marks=pytest.mark.slow), 16])
def test_tokens_and_forwards(decoder: Decoder, in_flight: int, room: EngineRoom) -> None:
    """Void forwards count nowhere, and there are few of them."""
    family, strategy = decoder
    dllm = {"strategy": strategy, "canvas_length": CANVAS}
    llm = room.start(family, dllm, max_num_seqs=16, **AHEAD)
    cases, before = shuffled(decoder, in_flight), void(llm)
    with at_most(llm, in_flight):
        outputs = generate(llm, [case.prompt for case in cases], [wish_for(c) for c in cases])
    for case, output in zip(cases, outputs, strict=True):
        check_case(case, output)
    needed = sum(case.record["num_forwards"] for case in cases)
    assert 0 < void(llm) - before < 0.35 * needed


@every_cached_decoder
@pytest.mark.parametrize("approximate", [False, True], ids=["exact", "approximate"])
def test_requests_of_all_kinds_in_one_batch(
    decoder: Decoder, approximate: bool, room: EngineRoom
) -> None:
    """Policies, block lengths, seeds, stop tokens, gaps; a void forward stores nothing for good."""
    llm = start_jobs(room, decoder, **AHEAD)
    before = scheduler(llm).num_computed_positions
    jobs = random_jobs(decoder, 20, seed=2 * approximate, approximate=approximate)
    jobs += random_gap_jobs(decoder, 8, seed=2 * approximate, approximate=approximate)
    for (job, text), output in zip(jobs, run(llm, [job for job, _ in jobs]), strict=True):
        check(job, text, output)
    computed = scheduler(llm).num_computed_positions - before
    assert computed >= sum(text.computed() for _, text in jobs)


@every_cached_decoder
def test_no_forward_is_void_where_it_would_leave_its_pages(
    decoder: Decoder, room: EngineRoom
) -> None:
    """It lies where the next refresh starts: inside of the block that is done, here."""
    llm, near = start_jobs(room, decoder, **AHEAD), {"full_refresh_every": 8, "refresh_before": 1}
    exact = [job for job, _ in random_jobs(decoder, 12) if job.numbers.get("block_length", 8) > 1]
    before = void(llm)
    run(llm, exact)
    assert void(llm) > before
    jobs = [FullJob(job.prompt, job.max_tokens, job.numbers | near, job.stop) for job in exact]
    before = void(llm)
    for job, output in zip(jobs, run(llm, jobs), strict=True):
        if (text := job.decode(decoder)).margin > TOO_CLOSE:
            check(job, text, output)
    assert void(llm) == before


@pytest.mark.parametrize("decoder", CACHED[:2], ids="-".join)  # LLaDA's schedule is even
def test_only_refreshes_wait_for_a_result(decoder: Decoder, room: EngineRoom) -> None:
    """On a schedule all other forwards are launched before the result of the one before is known.

    A refresh for nothing would not be void: it writes over the keys that its block still trusts.
    """
    llm, steps = start_jobs(room, decoder, **AHEAD), 4
    core, launched = scheduler(llm), list[tuple[int, bool]]()
    in_flight, launch = core.in_flight, core.in_flight.launch

    def noted(starts: dict[str, int]) -> None:
        for request_id, start in starts.items():
            launched.append((start, in_flight.count(request_id, start) > 0))
        launch(starts)

    numbers = {"policy": "low_confidence", "steps": steps, "block_length": 16}
    job, before = FullJob(a_prompt(24, 1), CANVAS, numbers), void(llm)
    in_flight.launch = noted
    try:
        check(job, job.decode(decoder), run(llm, [job])[0])
    finally:
        in_flight.launch = launch
    of_block = [False] + [True] * (steps - 1)
    blocks = range(24, 24 + CANVAS, 16)
    assert launched == [(start, ahead) for start in blocks for ahead in of_block]
    assert void(llm) == before


@every_cached_decoder
def test_preempted_with_forwards_in_flight(decoder: Decoder, room: EngineRoom) -> None:
    """Pages for two whole texts, while requests enter with the pages of their first canvas."""
    pages_of = {"canvas": 32, "block_size": 32, "num_gpu_blocks_override": 10}
    llm = start_jobs(room, decoder, **pages_of, **AHEAD)
    before, pages, jobs = num_preemptions(llm), free_pages(llm), small_blocks(decoder, 10)
    check_text(decoder, jobs, run(llm, jobs), canvas=32)
    assert num_preemptions(llm) > before
    assert free_pages(llm) == pages


@every_cached_decoder
def test_aborted_with_forwards_in_flight(decoder: Decoder, room: EngineRoom) -> None:
    """Whoever takes the slots and pages next, under the same names, gets its own text."""
    llm, jobs = start_jobs(room, decoder, **AHEAD), small_blocks(decoder, 6)
    engine, pages = llm.llm_engine, free_pages(llm)
    for steps in (1, 2, 3, 5, 8):
        for i, job in enumerate(jobs):
            engine.add_request(str(i), {"prompt_token_ids": job.prompt}, job.wish())
        for _ in range(steps):
            engine.step()
        engine.abort_request([str(i) for i in range(len(jobs))])
        if steps % 2:
            for job, output in zip(jobs[:3], run(llm, jobs[:3]), strict=True):
                assert token_ids(output) == job.decode(decoder).answer(), (job, steps)
    for job, output in zip(jobs, run(llm, jobs), strict=True):
        check(job, job.decode(decoder), output)
    while engine.has_unfinished_requests():
        engine.step()
    assert free_pages(llm) == pages


@every_cached_decoder
def test_compiled(decoder: Decoder, room: EngineRoom) -> None:
    """As in `test_full_compiled`: traced and not translated."""
    family, strategy = decoder
    dllm = {"strategy": strategy, "canvas_length": CANVAS}
    llm = room.start(family, dllm, max_num_seqs=16, **AHEAD)
    sampler = sampler_of(llm)
    uncompiled = sampler.rows.begin, sampler.decider.decide
    cases = [case for case in shuffled(decoder, 3) if case.numbers()["policy"] == "threshold"]
    with fresh_compiler():
        with torch.inference_mode():
            sampler.compile("eager")
        sampler.decider.decide = counted = Counted(sampler.decider.decide)
        outputs = generate(llm, [case.prompt for case in cases], [wish_for(c) for c in cases])
    sampler.rows.begin, sampler.decider.decide = uncompiled
    sampler.decider.compiled_for = None
    for case, output in zip(cases, outputs, strict=True):
        check_case(case, output)
    assert sum(counted.sizes) >= sum(case.record["num_forwards"] for case in cases)
