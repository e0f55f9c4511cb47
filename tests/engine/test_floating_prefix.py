"""Floating canvases with prefix caching: pages of prompts are found, those of texts are not."""

from typing import Any

import pytest
from engines import EngineRoom, a_prompt, generate, num_preemptions, params, token_ids
from test_schedules import ENGINES, check, start

from dllm_plugin.api.counts import counts_of
from dllm_plugin.engine.adaptive_scheduler import AdaptiveScheduler
from dllm_plugin.state.preempted import ResumedId

PAGE, TURN, TOKENS = 32, 70, 40
ON_GRID = [name for name, engine in ENGINES.items() if engine[4]]
on_a_grid = pytest.mark.parametrize("name", ON_GRID)


@on_a_grid
def test_a_turn_finds_the_pages_of_prompts(name: str, overlapped: bool, room: EngineRoom) -> None:
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
        counts = counts_of(output.outputs[0], TOKENS, len(prompt))
        assert counts is not None
        wasted.append(counts.wasted_positions)
    assert wasted[0] == wasted[1] > 0 and wasted[2] == wasted[3] > 0


@on_a_grid
def test_preempted_texts_find_their_prompts(
    name: str, room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a text had written is computed again in its pieces, behind the pages of its prompt."""
    resumed: list[int] = []
    schedule = AdaptiveScheduler.schedule

    def noted(self: AdaptiveScheduler, *args: Any) -> Any:
        output = schedule(self, *args)
        news = output.scheduled_new_reqs
        resumed.extend(r.num_computed_tokens for r in news if isinstance(r.req_id, ResumedId))
        return output

    monkeypatch.setattr(AdaptiveScheduler, "schedule", noted)
    llm = start(room, name, False, max_num_seqs=4, num_gpu_blocks_override=15)
    canvas, before = ENGINES[name][3], num_preemptions(llm)
    kinds = [[canvas, 2, canvas // 2], [2, canvas // 2], [canvas // 2]]
    wanted = [(a_prompt(64 + i, i), 60, kinds[i % 3]) for i in range(9)]
    wishes = [params(tokens, dllm_schedule=widths) for _, tokens, widths in wanted]
    outputs = generate(llm, [prompt for prompt, *_ in wanted], wishes)
    assert num_preemptions(llm) > before
    assert check(name, outputs, wanted) >= 5
    # Never more than the two pages of a prompt, and none where another request took them.
    assert resumed and set(resumed) <= {0, PAGE, 2 * PAGE} and any(resumed)
