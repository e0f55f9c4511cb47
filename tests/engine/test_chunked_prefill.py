"""SDAR: prompts in parts beside running requests equal prompts in one piece."""

from functools import cache
from typing import Any

import torch
from engines import (
    CHECKPOINTS,
    EngineRoom,
    free_pages,
    generate,
    letters,
    num_preemptions,
    params,
    results,
    scheduler,
)
from test_golden_traces import ForwardSpy

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Result, Text

SIZE, BUDGET = (
    8,
    50,
)  # three canvases of two blocks, and a remainder that holds no block
LENGTHS = (180, 2, 190, 1, 48, 49, 47, 200, 3, 90)
RULES = Rules(
    "block_diffusion",
    block_length=SIZE,
    canvas_length=2 * SIZE,
    on_grid=True,
    threshold=0.5,
)
WISH = params(20, dllm_threshold=RULES.threshold)


@cache
def plain() -> PlainModel:
    return PlainModel.load(CHECKPOINTS / "tiny-sdar")


@cache
def expected(length: int) -> Result:
    return decode(Text(plain(), letters(length, length), 20, RULES))


def start(room: EngineRoom, overlapped: bool, **options: Any) -> Any:
    settings = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 2, "block_size": 32}
    settings |= {"num_gpu_blocks_override": 12} | options
    return room.start(
        "sdar", {"block_length": SIZE}, async_scheduling=overlapped, **settings
    )


def test_prompts_longer_than_the_budget(overlapped: bool, room: EngineRoom) -> None:
    """Arriving one after the other and at once; no step computes more than the budget."""
    llm = start(room, overlapped)
    engine, steps, done, pages = llm.llm_engine, scheduler(llm), {}, free_pages(llm)
    assert steps.max_num_scheduled_tokens == BUDGET and steps.max_num_active_reqs == 2
    wish, most, before, step = (
        WISH,
        0,
        steps.num_computed_positions,
        0,
    )
    arrivals = {0: (180, 2), 4: (190, 1), 9: (48,), 10: (49,), 30: (47, 200, 3, 90)}
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for length in arrivals.get(step, ()):
            prompt = {"prompt_token_ids": letters(length, length)}
            engine.add_request(str(length), prompt, wish)
        done |= {int(out.request_id): out for out in engine.step() if out.finished}
        most, before = (
            max(most, steps.num_computed_positions - before),
            steps.num_computed_positions,
        )
        step += 1
    assert {length: results([out])[0] for length, out in done.items()} == {
        length: expected(length) for length in LENGTHS
    }
    assert SIZE * 2 < most <= BUDGET and free_pages(llm) == pages
    prompts = [letters(length, length) for length in reversed(LENGTHS)]
    again = results(generate(llm, prompts, wish))  # now with pages found in the cache
    assert again == [expected(length) for length in reversed(LENGTHS)]


def test_preempted_in_the_middle_of_a_prompt(room: EngineRoom) -> None:
    """After every few steps all running requests give their pages back."""
    llm = start(room, False)
    engine, done, step, before = llm.llm_engine, {}, 0, num_preemptions(llm)
    for length in (200, 5, 121):
        prompt = {"prompt_token_ids": letters(length, length)}
        engine.add_request(str(length), prompt, WISH)
    while engine.has_unfinished_requests():
        done |= {int(out.request_id): out for out in engine.step() if out.finished}
        step += 1
        if step in (2, 3, 9, 14):
            assert llm.reset_prefix_cache(reset_running_requests=True)
    assert num_preemptions(llm) > before
    assert {length: results([out])[0][0] for length, out in done.items()} == {
        length: expected(length).tokens for length in (200, 5, 121)
    }


def test_first_logits_of_a_prompt_in_parts(room: EngineRoom) -> None:
    llm, prompt = start(room, False), letters(157, 9)
    assert llm.reset_prefix_cache()
    with ForwardSpy(llm) as spy:
        generate(llm, [prompt], params(1))
    parts = [positions.tolist() for positions, _ in spy.forwards]
    assert [(part[0], len(part)) for part in parts[:5]] == [
        (0, 48),
        (48, 48),
        (96, 48),
        (144, 13),
        (152, 16),
    ]
    text = [*prompt, *[plain().mask_id] * 3]
    rows = plain().rows(text, [p // SIZE for p in range(len(text))])
    for positions, seen in spy.forwards[:3]:
        torch.testing.assert_close(seen, rows[positions], atol=5e-4, rtol=0)
    # The prompt's last, partial block counts with the rest of it.
    torch.testing.assert_close(spy.forwards[4][1][:8], rows[152:160], atol=5e-4, rtol=0)
