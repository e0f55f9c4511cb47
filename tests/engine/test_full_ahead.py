"""Full attention under asynchronous scheduling: forwards are launched before a result is known."""

from typing import Any

import pytest
import torch
from engines import (
    EngineRoom,
    a_prompt,
    at_most,
    forwards,
    free_pages,
    generate,
    num_preemptions,
    scheduler,
    token_ids,
)
from full_goldens import CANVAS
from full_jobs import (
    CONTEXT,
    DECODERS,
    TOO_CLOSE,
    Decoder,
    FullJob,
    check,
    every_decoder,
    random_jobs,
    run,
)
from full_jobs import start as start_jobs
from mixed import Counted, fresh_compiler
from template_jobs import random_gap_jobs
from test_full_compiled import sampler_of
from test_full_goldens import check as check_case
from test_full_goldens import shuffled, wish_for
from test_full_memory import check_text, small_blocks

pytestmark = pytest.mark.slow

CACHED = [decoder for decoder in DECODERS if decoder[1] != "semi_autoregressive"]
every_cached_decoder = pytest.mark.parametrize(
    "decoder", CACHED, ids="-".join, scope="module"
)
AHEAD = {"async_scheduling": True}


def void(llm: Any) -> int:
    """Forwards that were launched for nothing so far."""
    return int(scheduler(llm).in_flight.num_void)


@every_decoder
@pytest.mark.parametrize("in_flight", [1, 16])
def test_tokens_and_forwards(
    decoder: Decoder, in_flight: int, room: EngineRoom
) -> None:
    """Void forwards count nowhere, and there are few of them."""
    family, strategy = decoder
    dllm = {"strategy": strategy, "canvas_length": CANVAS}
    llm = room.start(family, dllm, max_num_seqs=16, **AHEAD)
    cases, before = shuffled(decoder, in_flight), void(llm)
    if in_flight == 1:  # guided requests need two places; half of all have each setting
        cases = [case for case in cases if not case.numbers().get("cfg_scale")][::2]
    with at_most(llm, in_flight):
        outputs = generate(
            llm, [case.prompt for case in cases], [wish_for(c) for c in cases]
        )
    for case, output in zip(cases, outputs, strict=True):
        check_case(case, output)
    needed = sum(case.record["num_forwards"] for case in cases)
    assert void(llm) - before < 0.35 * needed


@every_decoder
@pytest.mark.parametrize("approximate", [False, True], ids=["exact", "approximate"])
def test_requests_of_all_kinds_in_one_batch(
    decoder: Decoder, approximate: bool, room: EngineRoom
) -> None:
    """Policies, block lengths, seeds, stop tokens, gaps; a void forward stores nothing for good."""
    llm = start_jobs(room, decoder, **AHEAD)
    before, void_before = scheduler(llm).num_computed_positions, void(llm)
    # As many as it takes until a forward is void.
    wanted = 20 if decoder == DECODERS[3] and not approximate else 14
    jobs = random_jobs(decoder, wanted, seed=2 * approximate, approximate=approximate)
    jobs += random_gap_jobs(decoder, 8, seed=2 * approximate, approximate=approximate)
    for (job, text), output in zip(
        jobs, run(llm, [job for job, _ in jobs]), strict=True
    ):
        check(job, text, output)
    computed = scheduler(llm).num_computed_positions - before
    assert computed >= sum(text.num_positions() for _, text in jobs)
    assert void(llm) > void_before


@every_cached_decoder
def test_no_forward_is_void_if_it_would_leave_its_pages(
    decoder: Decoder, room: EngineRoom
) -> None:
    """It lies where the next refresh starts: inside of the block that is done, here."""
    llm, near = (
        start_jobs(room, decoder, **AHEAD),
        {"full_refresh_every": 8, "refresh_before": 1},
    )
    exact = [
        job
        for job, _ in random_jobs(decoder, 12)
        if job.numbers.get("block_length", 8) > 1
    ]
    sure = {
        "policy": "threshold",
        "block_length": 8,
    }  # by which the last masks fall together
    for i in range(18):
        numbers = sure | {"threshold": 0.3 + 0.05 * (i // 3)}
        exact.append(FullJob(a_prompt(20, i % 3), CANVAS, numbers))
    before = void(llm)
    run(llm, exact)
    assert void(llm) > before
    jobs = [
        FullJob(job.prompt, job.max_tokens, job.numbers | near, job.stop)
        for job in exact
    ]
    before = void(llm)
    for job, output in zip(jobs, run(llm, jobs), strict=True):
        if (text := job.decode(decoder)).margin > TOO_CLOSE:
            check(job, text, output)
    assert void(llm) == before


@pytest.mark.parametrize(
    "decoder", DECODERS[:3], ids="-".join
)  # LLaDA's schedule is even
def test_only_the_first_forward_waits_for_a_result(
    decoder: Decoder, room: EngineRoom
) -> None:
    """On a schedule all others are launched before the result of the one before is known.

    Refreshes too: the last step of a block takes all that is left, so none is for nothing.
    """
    llm, steps = start_jobs(room, decoder, **AHEAD), 4
    core, launched = scheduler(llm), list[tuple[int, bool]]()
    in_flight, launch = core.in_flight, core.in_flight.launch

    def noted(starts: dict[str, int]) -> None:
        for request_id, start in starts.items():
            ahead = any(request_id in step for step in in_flight._steps)
            launched.append((start, ahead))
        launch(starts)

    numbers = {"policy": "low_confidence", "steps": steps, "block_length": 16}
    job, before = FullJob(a_prompt(24, 1), CANVAS, numbers), void(llm)
    in_flight.launch = noted
    try:
        check(job, job.decode(decoder), run(llm, [job])[0])
    finally:
        in_flight.launch = launch
    blocks = range(24, 24 + CANVAS, 16)
    starts = [(start, step) for start in blocks for step in range(steps)]
    assert launched == [(start, ahead > 0) for ahead, (start, _) in enumerate(starts)]
    assert void(llm) == before


@every_decoder
def test_preempted_with_forwards_in_flight(decoder: Decoder, room: EngineRoom) -> None:
    """Pages for two whole texts, while requests enter with the pages of their first canvas."""
    pages_of = {"canvas": 32, "block_size": 32, "num_gpu_blocks_override": 10}
    llm = start_jobs(room, decoder, **pages_of, **AHEAD)
    before, pages, jobs = (
        num_preemptions(llm),
        free_pages(llm),
        small_blocks(decoder, 10),
    )
    check_text(decoder, jobs, run(llm, jobs), canvas=32)
    assert num_preemptions(llm) > before
    assert free_pages(llm) == pages


@pytest.mark.parametrize("decoder", [DECODERS[0], DECODERS[3]], ids="-".join)
def test_a_budget_for_one_forward(decoder: Decoder, room: EngineRoom) -> None:
    """The block behind one that is done waits like any other where a step has no room for it."""
    llm = start_jobs(room, decoder, max_num_batched_tokens=CONTEXT + 1, **AHEAD)
    jobs = small_blocks(decoder, 6)
    for job, output in zip(jobs, run(llm, jobs), strict=True):
        check(job, job.decode(decoder), output)


@every_decoder
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


@pytest.mark.parametrize(
    "decoder", [DECODERS[i] for i in (0, 2, 3, 4)], ids="-".join
)  # each strategy, and each family with a cache and without
def test_compiled(decoder: Decoder, room: EngineRoom) -> None:
    """As in `test_full_compiled`: traced and not translated."""
    family, strategy = decoder
    dllm = {"strategy": strategy, "canvas_length": CANVAS, "policy": "threshold"}
    llm = room.start(family, dllm, max_num_seqs=16, **AHEAD)
    sampler = sampler_of(llm)
    uncompiled = sampler.rows.begin, sampler.decider.decide
    cases = [
        case for case in shuffled(decoder, 3) if case.numbers()["policy"] == "threshold"
    ]
    with fresh_compiler():
        with torch.inference_mode():
            sampler.compile("eager")
        sampler.decider.decide = counted = Counted(sampler.decider.decide)
        outputs = generate(
            llm, [case.prompt for case in cases], [wish_for(c) for c in cases]
        )
    sampler.rows.begin, sampler.decider.decide = uncompiled
    sampler.decider.compiled_for = None
    for case, output in zip(cases, outputs, strict=True):
        check_case(case, output)
    assert sum(counted.sizes) >= sum(case.record["num_forwards"] for case in cases)


@pytest.mark.parametrize("threshold", [0.31, 0.41, 0.45, 0.51, 0.65])
def test_a_block_that_goes_on_after_its_last_step(
    threshold: float, room: EngineRoom
) -> None:
    """Dream's own threshold may leave most of a block to later steps, and then take all of it."""
    decoder = ("dream", "semi_autoregressive")
    llm, numbers = (
        start_jobs(room, decoder, **AHEAD),
        {"policy": "threshold", "block_length": 8},
    )
    jobs = [
        FullJob(a_prompt(20, i), CANVAS, numbers | {"threshold": threshold})
        for i in range(3)
    ]
    for job in jobs:
        if (text := job.decode(decoder)).margin > TOO_CLOSE:
            check(job, text, run(llm, [job])[0])


@every_decoder
def test_bad_words_that_a_last_step_takes_back(
    decoder: Decoder, room: EngineRoom
) -> None:
    """The block goes on then: what was launched behind it would spoil its keys."""
    numbers = {"policy": "low_confidence", "steps": 2, "block_length": 16}
    jobs = [FullJob(a_prompt(24, i), CANVAS, numbers) for i in range(3)]
    wishes = []
    for job in jobs:
        ids = job.decode(decoder).answer()
        pairs = [[a, b] for a, b in zip(ids[8:], ids[9:], strict=False) if a != b]
        wish = job.wish()
        wish._bad_words_token_ids = pairs[::3]
        wishes.append(wish)
    found = []
    for options in ({}, AHEAD):
        llm = start_jobs(room, decoder, **options)
        outputs = generate(llm, [job.prompt for job in jobs], wishes)
        found.append([(token_ids(output), forwards(output)) for output in outputs])
    assert found[0] == found[1]
