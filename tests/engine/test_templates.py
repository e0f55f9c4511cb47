"""Gaps to fill: tokens and forwards are those of the plain loops, whatever else is in the batch."""

from dataclasses import replace
from typing import Any

import pytest
from engines import (
    EngineRoom,
    a_prompt,
    canvas_states,
    forwards,
    generate,
    params,
    results,
    scheduler,
    token_ids,
)
from full_jobs import (
    CANVAS,
    DECODERS,
    Decoder,
    FullJob,
    check,
    check_preempted,
    every_decoder,
    random_jobs,
    run,
    start,
)
from template_jobs import gap_job, random_gap_jobs
from template_refusals import REFUSED, refusal

from dllm_plugin.reference.text import FILL

pytestmark = pytest.mark.slow

GAP = [FILL] * 12
TAIL = a_prompt(9, 4)


@every_decoder
def test_gaps_are_filled_as_in_plain_torch(decoder: Decoder, llm: Any) -> None:
    """Alone, and in one batch with ordinary requests."""
    gaps, jobs = random_gap_jobs(decoder, 16), random_jobs(decoder, 4)
    before = scheduler(llm).num_computed_positions
    both = [found for pair in zip(gaps, jobs, strict=False) for found in pair] + gaps[
        4:
    ]
    for (job, text), output in zip(
        both, run(llm, [job for job, _ in both]), strict=True
    ):
        check(job, text, output)
    wanted = sum(text.num_positions() for _, text in both)
    assert scheduler(llm).num_computed_positions - before == wanted
    for job, text in gaps[:6]:
        check(job, text, run(llm, [job])[0])
    given = [gap_job(job.prompt, [*job.template[: job.max_tokens]]) for job, _ in gaps]
    fills = zip(run(llm, given), gaps, strict=True)
    assert any(token_ids(output) != text.answer() for output, (_, text) in fills), (
        "tails matter"
    )


@every_decoder
def test_refreshes_that_cost_less_see_the_tail(decoder: Decoder, llm: Any) -> None:
    """A block without a gap counts among the blocks, of which some begin with a full refresh."""
    gaps = random_gap_jobs(decoder, 10, seed=2, approximate=True)
    for (job, text), output in zip(
        gaps, run(llm, [job for job, _ in gaps]), strict=True
    ):
        check(job, text, output)


@every_decoder
def test_suffixes_longer_than_the_canvas(decoder: Decoder, llm: Any) -> None:
    """They need no position of it: only gaps and what stands between them do."""
    jobs = []
    for approximate in (False, True):
        jobs += random_gap_jobs(decoder, 8, 4, approximate, suffix=CANVAS + 2)
    short, plain = random_gap_jobs(decoder, 2, 5), random_jobs(decoder, 2)
    together = [*jobs[:8], *short, *plain, *jobs[8:]]
    outputs = run(llm, [job for job, _ in together])
    for (job, text), output in zip(together, outputs, strict=True):
        check(job, text, output)
    exact = [replace(job, stop=()) for job, _ in jobs[:8]]
    assert check_preempted(llm, decoder, exact) >= 4


@every_decoder
def test_preempted_gaps_are_filled_again(decoder: Decoder, llm: Any) -> None:
    gaps = random_gap_jobs(decoder, 12, seed=3)
    jobs = [replace(job, stop=()) for job, _ in gaps]
    assert check_preempted(llm, decoder, jobs) >= 4


@every_decoder
def test_one_gap_and_no_tail_is_an_ordinary_request(decoder: Decoder, llm: Any) -> None:
    """Also above temperature 0, and with an EOS inside."""
    gaps, plain = list[FullJob](), list[FullJob]()
    for job, text in random_jobs(decoder, 12):
        length = min(job.max_tokens, 48)
        numbers = {k: v for k, v in job.numbers.items() if k != "cfg_scale"}
        numbers["block_length"] = length
        for options in ({}, {"temperature": 0.8, "seed": 7}):
            open_to = {
                k: v for k, v in numbers.items() if k not in ("top_p", "top_k", "seed")
            }
            given = (open_to | options) if options else numbers
            stop = (text.answer()[0],)
            if len(job.prompt) + length > 160:
                continue
            gaps.append(gap_job(job.prompt, [FILL] * length, given, stop))
            plain.append(FullJob(job.prompt, length, given, stop))
    assert len(gaps) > 12
    assert results(run(llm, gaps)) == results(run(llm, plain))
    assert results(run(llm, gaps[:2])) == results(run(llm, plain[:2]))


@every_decoder
def test_a_seed_fills_gaps_alike(decoder: Decoder, llm: Any) -> None:
    """Alone, in a batch, and each of several choices by itself."""
    template = [*GAP, 65, 66, *GAP, *TAIL]
    wishes = [
        params(
            26,
            temperature=0.7,
            seed=i,
            dllm_template=template,
            dllm_block_length=8,
            n=2,
        )
        for i in range(4)
    ]
    prompts = [a_prompt(20 + i, i) for i in range(4)]
    together = generate(llm, prompts, wishes)
    for i in (0, 3):
        alone = generate(llm, [prompts[i]], wishes[i])[0]
        assert [c.token_ids for c in alone.outputs] == [
            c.token_ids for c in together[i].outputs
        ]
    fills = {tuple(c.token_ids) for output in together for c in output.outputs}
    assert len(fills) == 8
    assert all(fill[12:14] == (65, 66) and len(fill) == 26 for fill in fills)


def test_rules_about_tokens_hold_in_gaps(room: EngineRoom) -> None:
    """Log-probabilities, biases, bans and bad words; a given token is certain and stays."""
    decoder = DECODERS[2]
    llm, prompt = start(room, decoder), a_prompt(21)
    template = [*[70] * 9, *GAP, 71, 72, *GAP, *TAIL]
    job = gap_job(prompt, template, {"policy": "low_confidence", "block_length": 8})
    text, [output] = job.decode(decoder), run(llm, [job], logprobs=2)
    check(job, text, output)
    for i, entry in enumerate(output.outputs[0].logprobs):
        token = text.answer()[i]
        if template[i] != FILL:
            assert {k: v.logprob for k, v in entry.items()} == {token: 0.0}
        else:
            row = text.raw[len(prompt) + i].log_softmax(-1)
            assert abs(entry[token].logprob - float(row[token])) < 1e-3
            assert set(entry) == {token, *row.topk(2).indices.tolist()}
    [output] = run(llm, [job], logit_bias={65: 100.0})
    assert token_ids(output) == [
        65 if token == FILL else token for token in template[:35]
    ]
    [output] = run(llm, [job], allowed_token_ids=[64, 65])
    assert set(token_ids(output)) == {64, 65, 70, 71, 72}
    seen = set(text.answer()[9:21])
    [output] = run(llm, [job], logit_bias={token: -100.0 for token in seen})
    assert not seen & set(token_ids(output)[9:21])


def test_bad_words_hold_across_the_ends_of_a_gap(room: EngineRoom) -> None:
    """A word that a given token begins, or that the tail ends, stands nowhere either."""
    decoder, (a, b, c) = DECODERS[2], (64, 65, 66)  # by their letters in the tokenizer
    llm, template = start(room, decoder), [a, *GAP, a, *GAP, b, *TAIL]
    job = gap_job(a_prompt(21), template, {"policy": "threshold", "threshold": 0.0})
    only = {"allowed_token_ids": [a, b, c]}
    free, bound = (
        token_ids(run(llm, [job], bad_words=words, **only)[0]) for words in ([], ["ab"])
    )
    assert (a, b) in zip(free, free[1:], strict=False)
    assert set(bound) <= {a, b, c} and [bound[0], bound[13]] == [a, a]
    assert (a, b) not in zip(bound, [*bound[1:], b], strict=True)


def test_what_ends_an_answer(room: EngineRoom) -> None:
    """EOS in a single gap; with several gaps it is a token like any other, as in what is given."""
    decoder, eos = DECODERS[2], 257
    llm, prompt, bias = start(room, decoder), a_prompt(21), {257: 100.0}
    wish = params(12, dllm_template=[*GAP, *TAIL], ignore_eos=False, logit_bias=bias)
    [output] = generate(llm, [prompt], wish)
    assert (token_ids(output), output.outputs[0].finish_reason) == ([eos], "stop")
    wish = params(
        12, dllm_template=[*GAP, *TAIL], ignore_eos=False, logit_bias=bias, min_tokens=5
    )
    [output] = generate(llm, [prompt], wish)
    assert eos not in token_ids(output)[:5]
    assert token_ids(output)[5:] == [eos]
    for template in ([*GAP, eos, *GAP, *TAIL], [65, eos, *GAP, *TAIL]):
        end = len(template) - len(TAIL)
        wish = params(end, dllm_template=template, ignore_eos=False, logit_bias=bias)
        [output] = generate(llm, [prompt], wish)
        assert output.outputs[0].finish_reason == "length"
        assert token_ids(output) == [eos if t == FILL else t for t in template[:end]]


def snapshots(
    llm: Any, prompt: list[int], wish: Any
) -> tuple[list[Any], list[list[int]]]:
    """What a request that is read output by output is told, and its pieces of text."""
    from vllm.sampling_params import RequestOutputKind

    wish.output_kind = RequestOutputKind.DELTA
    engine, told, pieces = llm.llm_engine, [], []
    engine.add_request("watched", {"prompt_token_ids": prompt}, wish)
    while engine.has_unfinished_requests():
        for output in engine.step():
            told.append((output.kv_transfer_params or {}).get("dllm"))
            pieces.append(list(output.outputs[0].token_ids))
    return [one for one in told if one], pieces


@pytest.mark.parametrize("early", [0, 1])
def test_gaps_are_watched_and_sent_early(early: int, room: EngineRoom) -> None:
    """Given tokens stand in the first frame without a confidence; no tail is told."""
    import numpy as np

    decoder = DECODERS[2]
    llm, prompt = start(room, decoder), a_prompt(21)
    template = [*[70] * 9, *GAP, 71, 72, *GAP, *TAIL]
    job = gap_job(prompt, template, {"policy": "low_confidence", "block_length": 8})
    wish = job.wish(dllm_frames=1, dllm_early_text=early)
    told, pieces = snapshots(llm, prompt, wish)
    answer = job.decode(decoder).answer()
    assert [token for piece in pieces for token in piece] == answer
    assert len(told) == forwards(run(llm, [job])[0])
    first = np.frombuffer(told[0]["ids"], dtype=np.int32)
    sure = np.frombuffer(told[0]["confidences"], dtype=np.uint8)
    start_ = told[0]["start"]
    assert start_ + len(first) == len(answer)
    for i, token in enumerate(template[start_ : len(answer)]):
        if token != FILL:
            assert (first[i], sure[i]) == (token, 255)
    assert (pieces[0][:9] == [70] * 9) == bool(early)
    [traced] = run(llm, [job], dllm_trace=1)
    steps, sure_when_taken = traced.outputs[0].routed_experts.T
    given = np.array(template[: len(answer)]) != FILL
    assert ((steps == 0) == given).all()
    assert (np.isnan(sure_when_taken) == given).all()


def test_who_gives_nothing_pays_nothing(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table exists before the first template, and later ordinary steps do not read it."""
    from dllm_plugin.sampling.features import templates
    from dllm_plugin.state.request_table import Templates

    decoder = DECODERS[2]
    room.close()
    llm, prompt = start(room, decoder), a_prompt(21)
    run(llm, [FullJob(prompt, 40)])
    states = canvas_states(llm)
    assert states.templates.table is None
    assert not scheduler(llm)._given
    run(llm, [gap_job(prompt, [*GAP, *TAIL])])
    assert states.templates.table is not None
    for owner, name in ((Templates, "given"), (templates, "commit_given")):
        monkeypatch.delattr(owner, name)
    run(llm, [FullJob(prompt, 40)])


def test_refused_by_name(room: EngineRoom) -> None:
    """One sentence; the next request is served."""
    decoder, job = DECODERS[0], gap_job(a_prompt(9), [*GAP, *TAIL])
    llm = start(room, decoder)
    for options, sentence in REFUSED:
        assert sentence in refusal(llm, a_prompt(9), options), options
    message = refusal(llm, a_prompt(150), {"dllm_template": [*GAP, *TAIL]})
    assert (
        "The prompt has 150 tokens and dllm_template 21 positions, but the context"
        in message
    )
    check(job, job.decode(decoder), run(llm, [job])[0])


@pytest.mark.parametrize(
    ("family", "dllm", "sentence"),
    [
        (
            "llada",
            {"strategy": "d2f"},
            "dllm_template needs full attention: under strategy 'd2f' a block never sees what "
            "comes after it. Use strategy dual_cache, prefix_cache or "
            "semi_autoregressive.",
        ),
        (
            "sdar",
            {},
            "dllm_template needs a model that sees the text after a gap; SDAR models attend "
            "causally from block to block. Models that can: LLaDA, LLaDA-MoE, Dream, RND1, A2D.",
        ),
    ],
)
def test_models_that_see_nothing_after_a_gap(
    family: str, dllm: dict[str, Any], sentence: str, room: EngineRoom
) -> None:
    llm = room.start(family, dllm, max_model_len=160)
    assert sentence in refusal(llm, a_prompt(9), {"dllm_template": [*GAP, *TAIL]})


def test_an_engine_with_a_suffix_window_shows_the_tail(room: EngineRoom) -> None:
    """The engine's default would hide what a template is for."""
    dllm = {"strategy": "dual_cache", "canvas_length": 48, "suffix_window": 3}
    llm = room.start("llada", dllm, max_model_len=160)
    numbers = {"policy": "threshold", "block_length": 6}
    job = gap_job(a_prompt(21), [*GAP, *TAIL], numbers)
    check(job, job.decode(("llada", "dual_cache")), run(llm, [job])[0])
