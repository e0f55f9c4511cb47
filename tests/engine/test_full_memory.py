"""Full attention under pressure: preemption, small budgets, aborts; pages always come back."""

from typing import Any

import pytest
from engines import (
    EngineRoom,
    a_prompt,
    abort_often,
    forwards,
    free_pages,
    num_preemptions,
    scheduler,
    step_through,
    token_ids,
)
from full_jobs import (
    CONTEXT,
    DECODERS,
    Decoder,
    FullJob,
    check,
    every_decoder,
    random_jobs,
    run,
    run_interrupted,
    start,
)

pytestmark = pytest.mark.slow


def small_blocks(decoder: Decoder, wanted: int) -> list[FullJob]:
    """Requests that outgrow their first pages; guided ones are shorter, for they run twice."""
    numbers = {"policy": "low_confidence", "steps": 3, "block_length": 16}
    jobs = [
        FullJob(a_prompt(20 + 5 * i, i), 90 - 5 * i, numbers) for i in range(wanted)
    ]
    if decoder == ("llada", "semi_autoregressive"):
        for i in range(1, wanted, 3):
            jobs[i] = FullJob(a_prompt(8 + i, i), 60, numbers | {"cfg_scale": 0.7})
    return jobs


def check_text(
    decoder: Decoder, jobs: list[FullJob], outputs: list[Any], canvas: int
) -> int:
    """The text of interrupted requests is their own; returns the forwards that were repeated."""
    repeated = 0
    for job, output in zip(jobs, outputs, strict=True):
        text = job.decode(decoder, canvas)
        assert token_ids(output) == text.answer(), job
        assert forwards(output) >= len(text.forwards), job
        repeated += forwards(output) - len(text.forwards)
    return repeated


@every_decoder
def test_preemption_under_pressure(decoder: Decoder, room: EngineRoom) -> None:
    """Pages for two whole texts, while requests enter with the pages of their first canvas."""
    llm = start(room, decoder, canvas=32, block_size=32, num_gpu_blocks_override=10)
    before, pages, jobs = (
        num_preemptions(llm),
        free_pages(llm),
        small_blocks(decoder, 10),
    )
    check_text(decoder, jobs, run(llm, jobs), canvas=32)
    assert num_preemptions(llm) > before
    assert free_pages(llm) == pages


@pytest.mark.parametrize("decoder", [DECODERS[1], DECODERS[3]], ids="-".join)
def test_a_budget_for_one_refresh(decoder: Decoder, room: EngineRoom) -> None:
    """Of two long passes one waits; small ones go along, and nobody is cut."""
    llm = start(room, decoder, max_num_batched_tokens=CONTEXT + 1)
    assert scheduler(llm).max_num_scheduled_tokens == CONTEXT + 1, "not raised"
    jobs = small_blocks(decoder, 6)
    outputs = run(llm, jobs)
    for job, output in zip(jobs, outputs, strict=True):
        check(job, job.decode(decoder), output)


@every_decoder
@pytest.mark.parametrize("every", [4, 5, 7])
def test_preemption_after_every_few_steps(
    decoder: Decoder, every: int, llm: Any
) -> None:
    """A preempted block starts again from the text before it, and comes out the same."""
    jobs = small_blocks(decoder, 3)
    before = num_preemptions(llm)
    outputs = run_interrupted(llm, [(job.prompt, job.wish()) for job in jobs], every)
    assert num_preemptions(llm) > before
    assert check_text(decoder, jobs, outputs, canvas=48) > 0


@every_decoder
def test_seeds_and_logprobs_survive_preemption(decoder: Decoder, llm: Any) -> None:
    numbers = {
        "policy": "low_confidence",
        "steps": 3,
        "block_length": 16,
        "temperature": 0.7,
    }
    jobs = [FullJob(a_prompt(9 + i, i), 60, numbers | {"seed": i}) for i in range(3)]
    calm = run(llm, jobs, logprobs=1)
    pairs = [(job.prompt, job.wish(logprobs=1)) for job in jobs]
    for first, second in zip(calm, run_interrupted(llm, pairs, 5), strict=True):
        assert token_ids(first) == token_ids(second)
        entries = zip(
            first.outputs[0].logprobs, second.outputs[0].logprobs, strict=True
        )
        for token, (entry, again) in zip(token_ids(first), entries, strict=True):
            assert abs(entry[token].logprob - again[token].logprob) < 1e-3


@every_decoder
def test_abort_gives_every_page_back(decoder: Decoder, llm: Any) -> None:
    """Aborted while waiting, after the first pass and in the middle of a block."""
    jobs = small_blocks(decoder, 6)
    pages = free_pages(llm)
    abort_often(llm, [(job.prompt, job.wish()) for job in jobs])
    # Nothing of them is left for those who come next under the same names.
    arrivals = {0: [(str(i), job.prompt, job.wish()) for i, job in enumerate(jobs)]}
    done = step_through(llm, arrivals)
    for i, job in enumerate(jobs):
        check(job, job.decode(decoder), done[str(i)])
    assert free_pages(llm) == pages


@every_decoder
def test_every_way_to_end_gives_every_page_back(decoder: Decoder, llm: Any) -> None:
    """By length, by a stop token, by the end of the context."""
    jobs = random_jobs(decoder, 6)
    pages = free_pages(llm)
    for job, text in jobs:
        check(job, text, run(llm, [job])[0])
        assert free_pages(llm) == pages, job
