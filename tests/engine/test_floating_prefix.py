"""Floating canvases with prefix caching: pages of prompts are found, those of texts are not."""

import time
from typing import Any

import pytest
from engines import (
    EngineRoom,
    a_prompt,
    generate,
    num_preemptions,
    params,
    scheduler,
    token_ids,
)
from test_schedules import ENGINES, check, start

from dllm_plugin.api.watched_engine import counts_of
from dllm_plugin.config.worker_carriers import RESUMED, unpack_id
from dllm_plugin.engine.scheduling.adaptive_scheduler import AdaptiveScheduler

pytestmark = pytest.mark.slow

PAGE, TURN, TOKENS = 32, 70, 40
ON_GRID = [name for name, engine in ENGINES.items() if engine[4]]
on_a_grid = pytest.mark.parametrize("name", ON_GRID)


@on_a_grid
def test_a_turn_finds_the_pages_of_prompts(
    name: str, overlapped: bool, room: EngineRoom
) -> None:
    """The next turn computes the answer again, and then its pages are those of a prompt."""
    llm = start(room, name, overlapped)
    assert llm.llm_engine.vllm_config.cache_config.block_size == PAGE
    llm.reset_prefix_cache()
    canvas = ENGINES[name][3]
    widths, found = [canvas, 1, canvas // 2, 2], []
    first = a_prompt(TURN, 1)
    wish = params(TOKENS, dllm_schedule=widths)
    [answer] = generate(llm, [first], [wish])
    second = first + token_ids(answer) + a_prompt(9, 3)
    for prompt in (first, second, second):
        found += generate(llm, [prompt], [wish])
    cached = [output.num_cached_tokens for output in (answer, *found)]
    whole = len(second) // PAGE * PAGE
    assert cached == [0, 2 * PAGE, 2 * PAGE, whole] and whole > 2 * PAGE
    wanted = [(prompt, TOKENS, widths) for prompt in (first, first, second, second)]
    check(name, [answer, *found], wanted)
    assert token_ids(found[0]) == token_ids(answer)
    assert token_ids(found[1]) == token_ids(found[2])
    wasted = []
    for output, (prompt, *_) in zip([answer, *found], wanted, strict=True):
        counts = counts_of(
            output.outputs[0], TOKENS, len(prompt), output.num_cached_tokens
        )
        assert counts is not None
        wasted.append(counts.wasted_positions)
    assert wasted[0] == wasted[1] > 0 and wasted[2] == wasted[3] > 0


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the prefills of requests that come back begin."""
    begins: list[int] = []
    schedule = AdaptiveScheduler.schedule

    def noted(self: AdaptiveScheduler, *args: Any) -> Any:
        output = schedule(self, *args)
        news = output.scheduled_new_reqs
        begins.extend(
            r.num_computed_tokens for r in news if unpack_id(r.req_id)[0] == RESUMED
        )
        return output

    monkeypatch.setattr(AdaptiveScheduler, "schedule", noted)
    return begins


@on_a_grid
def test_preempted_texts_find_their_prompts(
    name: str, room: EngineRoom, resumed: list[int]
) -> None:
    """What a text had written is computed again in its pieces, behind the pages of its prompt."""
    llm = start(room, name, False, max_num_seqs=4, num_gpu_blocks_override=15)
    canvas, before = ENGINES[name][3], num_preemptions(llm)
    kinds = [[canvas, 2, canvas // 2], [2, canvas // 2], [canvas // 2]]
    wanted = [(a_prompt(2 * PAGE + i, i), 60, kinds[i % 3]) for i in range(9)]
    wishes = [params(tokens, dllm_schedule=widths) for _, tokens, widths in wanted]
    outputs = generate(llm, [prompt for prompt, *_ in wanted], wishes)
    assert num_preemptions(llm) > before
    assert check(name, outputs, wanted) >= 5
    # Never more than the two pages of a prompt, and none where another request took them.
    assert resumed and set(resumed) <= {0, PAGE, 2 * PAGE} and any(resumed)


@on_a_grid
def test_a_text_that_comes_back_is_not_cut_where_a_canvas_ends(
    name: str, room: EngineRoom, resumed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its prompt is found, and its pieces do not end where canvases of their length do."""
    family, strategy, block, _, on_grid = ENGINES[name]
    canvas = block + block // 2
    monkeypatch.setitem(ENGINES, name, (family, strategy, block, canvas, on_grid))
    llm = start(room, name)
    engine, planner = llm.llm_engine, scheduler(llm)
    wanted = [(a_prompt(2 * PAGE, i), 90, [canvas - 1]) for i in range(4)]
    outputs = []
    for prompt, tokens, widths in wanted:
        wish = params(tokens, dllm_schedule=widths)
        engine.add_request("0", {"prompt_token_ids": prompt}, wish)
        began = len(resumed)
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
            for request in [r for r in planner.running if r.num_output_tokens > canvas]:
                if len(resumed) == began:
                    planner.running.remove(request)
                    planner._preempt_request(request, time.monotonic())
                    planner.prev_step_scheduled_req_ids.clear()
    assert resumed == [2 * PAGE] * len(wanted)
    assert check(name, outputs, wanted) >= 2
