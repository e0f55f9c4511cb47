"""LLaDA2.1 with edits and Fast-dLLM v2: recorded decodes, and what else a request may ask for."""

from typing import Any

import pytest
import torch
from block_cases import (
    FILES,
    GOLDENS,
    alone_with_traces,
    cases_of,
    num_forwards,
    shuffled,
    start,
    wish,
)
from engines import (
    EngineRoom,
    a_prompt,
    forwards,
    free_pages,
    generate,
    letters,
    num_preemptions,
    params,
    results,
    scheduler,
    token_ids,
)
from safetensors.torch import load_file
from test_golden_traces import ForwardSpy

from dllm_plugin.reference.model import PlainModel


@pytest.fixture(scope="module", params=["llada2.1", "fast-dllm-v2"])
def model(request: pytest.FixtureRequest) -> str:
    """Which tiny checkpoint; the tied one differs in its head alone, and has a test of its own."""
    return str(request.param)


def test_each_alone_with_its_trace(model: str, room: EngineRoom) -> None:
    alone_with_traces(start(room, model), model)


def test_first_logits(model: str, room: EngineRoom) -> None:
    """Of the first call that denoises, in a batch of its own."""
    llm, rows = start(room, model), {}
    for name in FILES[model]:
        rows |= {
            (name, k): v
            for k, v in load_file(GOLDENS / f"{name}.logits.safetensors").items()
        }
    for case in cases_of(model):
        kind = "first_logits" if model == "llada2.1" else "first_block_logits"
        recorded = rows[case["file"], f"{case['id']}/{kind}"]
        index = rows[case["file"], f"{case['id']}/{kind}_rows"].tolist()
        with ForwardSpy(llm) as spy:
            generate(llm, [case["prompt_ids"]], params(1, **wish(case).extra_args))
        seen: dict[int, torch.Tensor] = {}
        for positions, logits in spy.forwards[:2]:
            seen |= dict(zip(positions.tolist(), logits, strict=True))
        torch.testing.assert_close(
            torch.stack([seen[i] for i in index]), recorded, atol=5e-4, rtol=0
        )


def test_together_in_shuffled_order(model: str, room: EngineRoom) -> None:
    shuffled(start(room, model), model, 1)


def varied(model: str) -> list[tuple[list[int], Any]]:
    """Prompts and wishes with draws, rules and log-probabilities, edits on and off."""
    hot = {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 50, "logprobs": 2}
    letter = {"allowed_token_ids": list(range(64, 90))}
    wishes = [
        params(40, **hot),
        params(40, **hot | {"seed": 8, "logprobs": 0}, **letter),
        params(36, logprobs=1, dllm_policy="threshold", dllm_threshold=0.5),
        params(
            33, temperature=0.8, seed=3, dllm_policy="random", dllm_steps=8, logprobs=0
        ),
        params(35, stop_token_ids=list(range(60)), min_tokens=34),
        params(
            40,
            logit_bias={65: 30, 66: 29},
            temperature=0.9,
            seed=1,
            min_p=0.1,
            logprobs=5,
        ),
    ]
    if model != "llada2.1":
        more = {"dllm_use_block_cache": True, "dllm_sub_block_length": 12}
        wishes.append(params(40, **hot, **more))
        wishes.append(params(40, **hot, dllm_block_length=4))
    lengths = (1, 32, 31, 33, 64, 50, 45, 40)  # whole blocks, one token, and in between
    return [(a_prompt(lengths[i], i), one) for i, one in enumerate(wishes)]


def test_draws_rules_and_logprobs(model: str, room: EngineRoom) -> None:
    llm, jobs = start(room, model), varied(model)
    together = generate(llm, [prompt for prompt, _ in jobs], [one for _, one in jobs])
    for (prompt, one), output in zip(jobs, together, strict=True):
        [alone] = generate(llm, [prompt], one)
        assert results([alone]) == results([output]), one
        completion = output.outputs[0]
        assert len(completion.token_ids) >= max(one.min_tokens, 1)
        assert one.min_tokens or len(completion.token_ids) == one.max_tokens
        stops = set(one.stop_token_ids or ())
        assert not stops & set(completion.token_ids[: one.min_tokens])
        if one.allowed_token_ids:
            assert set(completion.token_ids) <= set(one.allowed_token_ids)
        if one.logit_bias and one.logprobs:
            assert set(completion.token_ids) <= set(one.logit_bias)
        if one.logprobs is None:
            continue
        # Also of the token that a commit predicts, the first of a block.
        same = zip(completion.logprobs, alone.outputs[0].logprobs, strict=True)
        for token, (scored, again) in zip(completion.token_ids, same, strict=True):
            assert token in scored and len(scored) in (one.logprobs, one.logprobs + 1)
            assert set(scored) == set(again)
            assert all(abs(scored[i].logprob - again[i].logprob) < 1e-3 for i in scored)
            assert (
                sum(torch.tensor(s.logprob).exp() for s in scored.values()) <= 1 + 1e-4
            )
            ranks = sorted((s.rank, s.logprob) for i, s in scored.items() if i != token)
            assert [r for r, _ in ranks] == list(range(1, one.logprobs + 1))[
                : len(ranks)
            ] or (scored[token].rank <= one.logprobs)


def test_n_completions(model: str, room: EngineRoom) -> None:
    llm, prompt = start(room, model), a_prompt(32, 4)
    hot = {"temperature": 0.9, "seed": 20}
    [many] = generate(llm, [prompt], params(40, n=3, **hot))
    singles = generate(
        llm, [prompt] * 3, [params(40, **hot | {"seed": 20 + i}) for i in range(3)]
    )
    assert [list(c.token_ids) for c in many.outputs] == [token_ids(o) for o in singles]


def test_bad_words_across_the_border_of_blocks(model: str, room: EngineRoom) -> None:
    """The first token of a block is decided apart from the others, and completes no word."""
    llm, text = start(room, model), letters(20, 2)
    for options in ({}, {"temperature": 1.5, "seed": 5}):
        wish: dict[str, Any] = {"allowed_token_ids": list(range(64, 90)), **options}
        banned: list[str] = []
        for size, back in ((2, 1), (3, 1), (3, 2), (4, 2)):
            [output] = generate(llm, [text], params(50, bad_words=banned, **wish))
            border = 32 - len(text) - back
            banned.append(output.outputs[0].text[border : border + size])
        [output] = generate(llm, [text], params(50, bad_words=banned, **wish))
        assert len(output.outputs[0].text) == 50
        assert not [word for word in banned if word in output.outputs[0].text]


def test_stop_tokens_in_the_middle_of_a_block(model: str, room: EngineRoom) -> None:
    """One that is edited away ends nothing; one at the head of a block is known before the rest."""
    llm, cases = start(room, model), cases_of(model)
    if model == "llada2.1":
        found = 0
        for case in cases:
            one, written = (
                wish(case),
                {t for call in case["forwards"] for _, t in call["new"]},
            )
            stops = sorted(written - {*case["output_ids"], *one.stop_token_ids})[:20]
            one.stop_token_ids, found = (
                [*one.stop_token_ids, *stops],
                found + len(stops),
            )
            [output] = generate(llm, [case["prompt_ids"]], one)
            assert token_ids(output) == case["output_ids"], case["id"]
        assert found > 20
        return
    for case in cases:
        first, answer, one = len(case["prompt_ids"]), case["output_ids"], wish(case)
        heads = {
            p: t for c in case["forwards"] if c["kind"] == "commit" for p, t in c["new"]
        }
        for place, stop in heads.items():
            if place - first < len(answer) and answer.index(stop) == place - first:
                one.stop_token_ids = [stop]
                [output] = generate(llm, [case["prompt_ids"]], one)
                assert token_ids(output) == answer[: place - first + 1], (
                    case["id"],
                    place,
                )


def test_aborted_and_preempted_in_the_middle_of_a_block(
    model: str, room: EngineRoom
) -> None:
    """Neighbours and what comes back go on as they would have, and every page is given back."""
    llm, cases = start(room, model), cases_of(model)
    engine, pages, step, done = llm.llm_engine, free_pages(llm), 0, {}
    for case in cases:
        engine.add_request(
            case["id"] + case["file"],
            {"prompt_token_ids": case["prompt_ids"]},
            wish(case),
        )
    gone = cases[0]["id"] + cases[0]["file"]
    before = num_preemptions(llm)
    while engine.has_unfinished_requests():
        done |= {
            output.request_id: output for output in engine.step() if output.finished
        }
        step += 1
        if step == 4:
            engine.abort_request([gone])
        if step in (6, 15):
            assert llm.reset_prefix_cache(reset_running_requests=True)
    assert (
        num_preemptions(llm) > before and free_pages(llm) == pages and gone not in done
    )
    for case in cases[1:]:
        output = done[case["id"] + case["file"]]
        assert token_ids(output) == case["output_ids"], (case["file"], case["id"])


def test_fed_a_block_while_many_run(overlapped: bool, room: EngineRoom) -> None:
    """Edits that come when canvases have been fed whole, and are fed a block each again."""
    options = {"canvas_length": 64, "commit_alone_from": 3}
    settings = {
        "async_scheduling": overlapped,
        "block_size": 32,
        "num_gpu_blocks_override": 10,
    }
    llm, cases = room.start("llada2.1", options, **settings), cases_of("llada2.1")
    before = num_preemptions(llm)
    outputs = generate(
        llm, [case["prompt_ids"] for case in cases], [wish(c) for c in cases]
    )
    for case, output in zip(cases, outputs, strict=True):
        assert token_ids(output) == case["output_ids"], case["id"]
        assert forwards(output) >= num_forwards(case), case["id"]
    assert num_preemptions(llm) > before
    # Checks that replace tokens draw by the step, whether or not a block rode along.
    wishes = [params(64, temperature=1.0, seed=seed) for seed in range(4)]
    prompts = [letters(20 + seed, seed) for seed in range(4)]
    together = [token_ids(output) for output in generate(llm, prompts, wishes)]
    for prompt, one, tokens in zip(prompts, wishes, together, strict=True):
        assert token_ids(generate(llm, [prompt], one)[0]) == tokens


def conversation(llm: Any, turns: int) -> list[list[int]]:
    text, said = letters(45), []
    for turn in range(turns):
        [output] = generate(llm, [text], params(60))
        said.append(token_ids(output))
        text = text + said[-1] + letters(9, 10 + turn)
    return said


def hits(llm: Any) -> int:
    [counter] = [m for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits"]
    return int(counter.value)


LONG = [
    letters(length, seed=length)
    for length in (1, 7, 33, 64, 65, 100, 150, 180, 199, 2, 1)
]
UNCUT: dict[str, tuple[list[list[int]], Any]] = {}


def uncut(room: EngineRoom, model: str) -> tuple[list[list[int]], Any]:
    """A conversation and long prompts, in one piece, pages found again, nobody preempted."""
    if model not in UNCUT:
        llm = start(room, model)
        before = hits(llm)
        said = conversation(llm, 2)
        # The answer's last block was never stored.
        assert (hits(llm) - before) % 32 == 0 and hits(llm) - before >= 64
        UNCUT[model] = said, results(generate(llm, LONG, params(40, logprobs=0)))
    return UNCUT[model]


def small_steps(room: EngineRoom, model: str, **options: Any) -> Any:
    """A budget that the longest prompts take several steps of, and few pages."""
    canvas = 64 if model == "llada2.1" else 32
    settings: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 5 * canvas + 3,
    }
    settings |= {"block_size": 32, "num_gpu_blocks_override": 9}
    return start(room, model, True, **settings | options)


def test_prompts_in_parts(model: str, room: EngineRoom) -> None:
    """Beside running requests, asynchronously, without a cache and with preemption."""
    said, long = uncut(room, model)
    llm = small_steps(room, model, enable_prefix_caching=False)
    assert scheduler(llm).scheduler_config.enable_chunked_prefill
    before, pages = num_preemptions(llm), free_pages(llm)
    assert results(generate(llm, LONG, params(40, logprobs=0))) == long
    assert num_preemptions(llm) > before and free_pages(llm) == pages
    assert conversation(llm, 2) == said
    shuffled(llm, model, 4, counts=False)


def test_preempted_requests_find_their_pages(model: str, room: EngineRoom) -> None:
    _, long = uncut(room, model)
    llm = small_steps(room, model)
    before = num_preemptions(llm)
    shuffled(llm, model, 5, counts=False)
    assert results(generate(llm, LONG, params(40, logprobs=0))) == long
    assert num_preemptions(llm) > before


def test_logprobs_of_the_first_tokens_of_blocks(room: EngineRoom) -> None:
    """They are read from the last row of the block before, fed without masks."""
    llm, prompt = small_steps(room, "fast-dllm-v2"), letters(30, 1)
    plain = PlainModel.load(GOLDENS / "checkpoints" / "tiny-fast-dllm-v2")
    [output] = generate(llm, [prompt], params(100, logprobs=1))
    text = prompt + token_ids(output)
    rows = plain.rows(text, [p // 32 for p in range(len(text))]).log_softmax(-1)
    for place in range(32, len(text), 32):
        best, token = int(rows[place - 1].argmax()), text[place]
        scored = output.outputs[0].logprobs[place - len(prompt)][token]
        assert (token, scored.rank) == (best, 1)
        assert abs(scored.logprob - float(rows[place - 1][token])) < 1e-3


def test_tied_embeddings(room: EngineRoom) -> None:
    alone_with_traces(start(room, "fast-dllm-v2-tied"), "fast-dllm-v2-tied")
