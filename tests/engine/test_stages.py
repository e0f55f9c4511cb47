"""Two stages of a pipeline give the tokens of one, whatever requests ask for."""

from collections import Counter
from typing import Any

import pytest
from engines import (
    EngineRoom,
    a_prompt,
    forwards,
    free_pages,
    generate,
    letters,
    num_preemptions,
    params,
    scheduler,
    token_ids,
)
from grammar_requests import wish as grammar_wish
from test_grid_goldens import CANVAS
from test_stages_families import STAGES, check_full, check_recorded
from test_traces import trace

pytestmark = [
    pytest.mark.usefixtures("template", "workers_end_soon"),
    pytest.mark.slow,
]

FEW_PAGES = {"block_size": 32, "num_gpu_blocks_override": 14}
Request = tuple[list[int], Any]


def start(room: EngineRoom, **options: Any) -> Any:
    return room.start("sdar", CANVAS, async_scheduling=True, **options)


def mixed() -> list[Request]:
    """Short texts, seeds, log-probabilities, stops, grammars, frames and traces."""
    hot = {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 50, "logprobs": 2}
    regex = "[a-f]{5,20}z"
    wishes = [
        params(1),
        params(2, logprobs=0),
        params(60, **hot),
        params(
            33, temperature=0.8, seed=3, dllm_policy="random", dllm_steps=8, logprobs=0
        ),
        params(35, stop_token_ids=list(range(60)), min_tokens=34),
        grammar_wish("regex", regex, 24, dllm_grammar="drafts"),
        grammar_wish("regex", regex, 24, dllm_grammar="automaton"),
        params(40, dllm_trace=1),
        params(40, dllm_frames=1),
        params(40, dllm_early_text=1, dllm_block_length=16),
    ]
    wishes += [params(70)] * 4
    return [(letters(7 + 11 * i, i), one) for i, one in enumerate(wishes)]


def run(llm: Any, requests: list[Request]) -> list[Any]:
    return generate(llm, [p for p, _ in requests], [one for _, one in requests])


def scores(output: Any) -> list[dict[int, float]]:
    """The log-probabilities of each token."""
    rows = output.outputs[0].logprobs or []
    return [{i: scored.logprob for i, scored in row.items()} for row in rows]


@pytest.fixture(scope="module")
def wanted(room: EngineRoom) -> list[Any]:
    """Outputs of one stage."""
    return run(start(room), mixed())


def test_requests_as_on_one_stage(room: EngineRoom, wanted: list[Any]) -> None:
    requests = mixed()
    found = run(start(room, **STAGES), requests)
    for (_, one), output, other in zip(requests, found, wanted, strict=True):
        assert token_ids(output) == token_ids(other), one
        assert forwards(output) == forwards(other), one
        for row, expected in zip(scores(output), scores(other), strict=True):
            assert row == pytest.approx(expected, abs=1e-4)
    [place] = [
        i
        for i, (_, one) in enumerate(requests)
        if "dllm_trace" in (one.extra_args or ())
    ]
    assert trace(found[place])[0] == trace(wanted[place])[0]
    check_recorded("sdar", room, async_scheduling=True, **STAGES)


def test_requests_are_shared_among_steps(room: EngineRoom) -> None:
    """All wait at once; else the second stage would rest while the first one computes."""
    llm = start(room, **STAGES)
    engine, ours = llm.llm_engine, scheduler(llm)
    for i in range(9):
        prompt = {"prompt_token_ids": a_prompt(20, i)}
        engine.add_request(str(i), prompt, params(32))
    shares = []
    while engine.has_unfinished_requests():
        engine.step()
        steps = Counter(r.next_decode_eligible_step % 2 for r in ours.running)
        if len(ours.running) == 9:
            shares.append(sorted(steps.values()))
    assert len(shares) > 8 and all(share == [4, 5] for share in shares)


def test_aborted_and_preempted(room: EngineRoom, wanted: list[Any]) -> None:
    requests = mixed()
    llm = start(room, **FEW_PAGES, **STAGES)
    engine, pages, before = llm.llm_engine, free_pages(llm), num_preemptions(llm)
    names = [str(i) for i in range(len(requests))]
    for name, (prompt, one) in zip(names, requests, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, one)
    done, step, gone = {}, 0, ["4", "10"]
    while engine.has_unfinished_requests():
        done |= {one.request_id: one for one in engine.step() if one.finished}
        step += 1
        if step == 9:
            engine.abort_request(gone)
    assert num_preemptions(llm) > before and free_pages(llm) == pages
    for name, output in zip(names, wanted, strict=True):
        if name not in gone:
            assert token_ids(done[name]) == token_ids(output), name


def test_full_attention(room: EngineRoom) -> None:
    check_full("llada", "prefix_cache", room, async_scheduling=True, **STAGES)
