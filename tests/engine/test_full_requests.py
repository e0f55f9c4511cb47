"""Full attention: whatever else is in the batch, a request gets its own tokens and forwards."""

from dataclasses import replace
from typing import Any

import pytest
from engines import (
    EngineRoom,
    a_prompt,
    generate,
    params,
    results,
    scheduler,
    step_through,
)
from full_jobs import (
    CONTEXT,
    DECODERS,
    Decoder,
    FullJob,
    check,
    check_preempted,
    every_decoder,
    random_jobs,
    run,
)
from jobs import plain_model

from dllm_plugin.engine import model_state
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text
from dllm_plugin.state.canvas_states import CanvasStates

pytestmark = pytest.mark.slow

DEFAULT = {"policy": "threshold"}
APPROXIMATE = ("full_refresh_every", "refresh_before", "suffix_window")
PROMPTS = [a_prompt(length, length) for length in (3, 20, 33, 40, 60, 64)]


def computed(llm: Any) -> int:
    """Positions that all forwards of an engine have computed so far."""
    return scheduler(llm).num_computed_positions


@every_decoder
def test_random_settings_in_one_batch(
    decoder: Decoder, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: a mixed batch computes as many positions as its requests alone, and no more.

    Requests without approximations pay nothing for those that others could ask for.
    """
    jobs = random_jobs(decoder, 12)
    monkeypatch.delattr(model_state, "write_committed")
    monkeypatch.delattr(CanvasStates, "next_refresh_np")
    before = computed(llm)
    outputs = run(llm, [job for job, _ in jobs])
    for (job, text), output in zip(jobs, outputs, strict=True):
        check(job, text, output)
        ends = "stop" if text.answer()[-1] in job.stop else "length"
        assert output.outputs[0].finish_reason == ends, job
    assert computed(llm) - before == sum(text.num_positions() for _, text in jobs)


@every_decoder
def test_refreshes_that_cost_less(decoder: Decoder, llm: Any) -> None:
    """Each request has its own; they compute what the plain loop does, alone and in a batch."""
    jobs = random_jobs(decoder, 16, seed=2, approximate=True)
    before = computed(llm)
    for (job, text), output in zip(
        jobs, run(llm, [job for job, _ in jobs]), strict=True
    ):
        check(job, text, output)
    assert computed(llm) - before == sum(text.num_positions() for _, text in jobs)
    for job, text in jobs[:3]:
        check(job, text, run(llm, [job])[0])
    exact = [
        replace(job, numbers=exactly(job.numbers)).decode(decoder) for job, _ in jobs
    ]
    assert sum(text.num_positions() for _, text in jobs) < sum(
        text.num_positions() for text in exact
    )
    assert any(a.answer() != b.answer() for (_, a), b in zip(jobs, exact, strict=True))


@pytest.mark.parametrize("decoder", DECODERS[2:6:3], ids="-".join, scope="module")
def test_an_engine_whose_refreshes_cost_less(
    decoder: Decoder, room: EngineRoom
) -> None:
    """Requests that say nothing get the engine's; one that says otherwise decodes exactly."""
    cheap = {"full_refresh_every": 3, "refresh_before": 5, "suffix_window": 8}
    family, strategy = decoder
    dllm = {"strategy": strategy, "canvas_length": 48, "block_length": 8, **cheap}
    llm = room.start(family, dllm, max_model_len=CONTEXT)
    exact = {"full_refresh_every": 1, "suffix_window": 48}
    for given, meant in (({}, cheap), (exact, exact), ({"refresh_before": 9}, cheap)):
        job = FullJob(PROMPTS[3], 60, {"block_length": 8, **meant, **given})
        [output] = generate(llm, [job.prompt], FullJob(job.prompt, 60, given).wish())
        check(job, replace(job, numbers=job.numbers | DEFAULT).decode(decoder), output)


def exactly(numbers: dict[str, Any]) -> dict[str, Any]:
    """The same settings without approximations."""
    return {k: v for k, v in numbers.items() if k not in APPROXIMATE}


@every_decoder
def test_preempted_requests_begin_with_a_full_refresh(
    decoder: Decoder, llm: Any
) -> None:
    """Whatever their refreshes trusted is gone."""
    jobs = [job for job, _ in random_jobs(decoder, 8, seed=3, approximate=True)]
    assert check_preempted(llm, decoder, jobs) > len(jobs) // 2


@every_decoder
def test_one_more_request_every_step(decoder: Decoder, llm: Any) -> None:
    """First passes of some requests share forwards with later passes of others."""
    jobs = random_jobs(decoder, 8)
    arrivals = {
        i: [(str(i), job.prompt, job.wish())] for i, (job, _) in enumerate(jobs)
    }
    done = step_through(llm, arrivals)
    for i, (job, text) in enumerate(jobs):
        check(job, text, done[str(i)])


@every_decoder
def test_every_max_tokens_up_to_two_canvases(decoder: Decoder, llm: Any) -> None:
    """Two canvases of 48 hold four whole blocks of 20, and each block may be cut anywhere."""
    numbers = {"policy": "low_confidence", "steps": 3, "block_length": 20}
    jobs = [FullJob(a_prompt(11, 1), n, numbers) for n in range(1, 82, 4)]
    for job, output in zip(jobs, run(llm, jobs), strict=True):
        check(job, job.decode(decoder), output)
        assert len(output.outputs[0].token_ids) == job.max_tokens


@every_decoder
def test_the_context_ends_inside_a_block(decoder: Decoder, llm: Any) -> None:
    numbers = {"policy": "low_confidence", "steps": 5, "block_length": 16}
    lengths = (
        CONTEXT - 1,
        CONTEXT - 2,
        CONTEXT - 16,
        CONTEXT - 17,
        CONTEXT - 48,
        CONTEXT - 70,
    )
    jobs = [FullJob(a_prompt(length, length), 200, numbers) for length in lengths]
    for job, output in zip(jobs, run(llm, jobs), strict=True):
        check(job, job.decode(decoder), output)
        assert len(output.outputs[0].token_ids) == CONTEXT - len(job.prompt)


@every_decoder
def test_a_canvas_ends_where_its_text_is_the_next_prompt(
    decoder: Decoder, llm: Any
) -> None:
    """Two requests in a row, the second with the first one's answer, equal one long request."""
    prompt = a_prompt(14, 3)
    plain = {"dllm_policy": "low_confidence", "dllm_steps": 4, "dllm_block_length": 16}
    guided = plain | {"dllm_cfg_scale": 0.7}
    for numbers in [plain, guided] if decoder == DECODERS[0] else [plain]:
        [(first, steps)] = results(generate(llm, [prompt], params(48, **numbers)))
        [(second, more)] = results(
            generate(llm, [prompt + first], params(30, **numbers))
        )
        [whole] = results(generate(llm, [prompt], params(78, **numbers)))
        assert whole == (first + second, steps + more), numbers


@every_decoder
def test_a_threshold_is_met_by_equality(decoder: Decoder, llm: Any) -> None:
    """The only token that is allowed has confidence 1, so each block is taken at once."""
    family, strategy = decoder
    numbers = {
        "dllm_policy": "threshold",
        "dllm_threshold": 1.0,
        "dllm_block_length": 16,
    }
    wish = params(48, allowed_token_ids=[65], **numbers)
    leads = family == "dream" and strategy != "semi_autoregressive"
    [got] = results(generate(llm, [PROMPTS[1]], wish))
    assert got == ([65] * 48, 6 if leads else 3)


def seeded(i: int, **options: Any) -> Any:
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}]
    shape = {"temperature": 0.7, "seed": i, "dllm_block_length": 16}
    return params(60, **shape | filters[i % 4] | options)


@every_decoder
def test_a_seed_gives_one_text(decoder: Decoder, llm: Any) -> None:
    """Alone, in a batch, and in a batch in another order; other seeds give other texts."""
    wishes = [seeded(i) for i in range(len(PROMPTS))]
    alone = [results(generate(llm, [PROMPTS[i]], wishes[i]))[0] for i in (0, 3)]
    together = results(generate(llm, PROMPTS, wishes))
    assert [together[0], together[3]] == alone
    assert results(generate(llm, PROMPTS[::-1], wishes[::-1])) == together[::-1]
    others = generate(llm, [PROMPTS[1]] * 6, [seeded(4 * i) for i in range(6)])
    assert len({tuple(tokens) for tokens, _ in results(others)}) == 6


@pytest.mark.parametrize("decoder", DECODERS[3:], ids="-".join, scope="module")
def test_draws_of_dream_are_those_of_its_counters(decoder: Decoder, llm: Any) -> None:
    """Token streams count steps inside a block; with few candidates no draw is a close call."""
    family, strategy = decoder
    compared = 0
    numbers = {
        "policy": "low_confidence",
        "steps": 4,
        "block_length": 16,
        "temperature": 0.7,
    }
    wishes, texts = [], []
    for seed, prompt in enumerate(PROMPTS):
        job = FullJob(prompt, 40, numbers | {"seed": seed})
        rules = Rules(strategy, top_k=3, canvas_length=48, **job.numbers)
        texts.append(Text(plain_model(family), prompt, 40, rules))
        decode(texts[-1])
        wishes.append(job.wish(top_k=3))
    got = results(generate(llm, PROMPTS, wishes))
    for text, result in zip(texts, got, strict=True):
        if text.margin > 1e-4:
            assert result == text.result()
            compared += 1
    assert compared >= 2


@every_decoder
def test_logprobs_are_those_of_the_unmasking_step(decoder: Decoder, llm: Any) -> None:
    numbers = {"policy": "low_confidence", "steps": 5}
    jobs = [FullJob(prompt, 60, numbers | {"block_length": 16}) for prompt in PROMPTS]
    for job, output in zip(jobs, run(llm, jobs, logprobs=2), strict=True):
        text, completion = job.decode(decoder), output.outputs[0]
        check(job, text, output)
        assert len(completion.logprobs) == 60
        for i, (token, entry) in enumerate(
            zip(text.answer(), completion.logprobs, strict=True)
        ):
            row = text.raw[len(job.prompt) + i].log_softmax(-1)
            assert abs(entry[token].logprob - float(row[token])) < 1e-3
            assert set(entry) == {token, *row.topk(2).indices.tolist()}
