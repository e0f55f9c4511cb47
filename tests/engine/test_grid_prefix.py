"""Prefix caching of block-causal models: the same text, fewer positions, never a partial block."""

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
from test_requests_refused import refusal

pytestmark = pytest.mark.slow

# With and without steps that are launched ahead.
MODELS = [
    *[("sdar", True), ("llada2.0", True)],
    *[("sdar-moe", False), ("stable-diffcoder", False)],
]
every_model = pytest.mark.parametrize(("model", "overlapped"), MODELS)
SHARED = letters(150, 3)
# Just above the least, four canvases and a part of a prompt: prompts come in parts.
PARTS = {"max_num_seqs": 4, "max_num_batched_tokens": 5 * 32 + 3}


def start(
    room: EngineRoom, model: str, caching: bool, overlapped: bool, **options: Any
) -> Any:
    settings: dict[str, Any] = {
        "block_size": 32,
        "enable_prefix_caching": caching,
    } | options
    dllm = {"block_length": 16, "canvas_length": 32}
    return room.start(model, dllm, async_scheduling=overlapped, **settings)


def hits(llm: Any) -> int:
    """Tokens found in the cache, as vLLM's own metric counts them."""
    [counter] = [m for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits"]
    return int(counter.value)


def answers(llm: Any, prompts: list[list[int]], tokens: int = 40) -> list[list[int]]:
    wish = params(tokens, dllm_policy="low_confidence", dllm_steps=4)
    return [token_ids(output) for output in generate(llm, prompts, wish)]


def conversation(llm: Any, turns: int) -> list[list[int]]:
    """Each turn brings everything so far and a few new tokens."""
    text, said = letters(37, 1), []
    for turn in range(turns):
        [answer] = answers(llm, [text])
        said.append(answer)
        text = text + answer + letters(9, 10 + turn)
    return said


@every_model
def test_a_conversation(model: str, overlapped: bool, room: EngineRoom) -> None:
    """Prompt and generated blocks are found again; what ended a turn is not cached."""
    plain = conversation(start(room, model, False, overlapped), 4)
    llm = start(room, model, True, overlapped)
    before, pages = hits(llm), free_pages(llm)
    assert conversation(llm, 4) == plain
    # Turn k brings 37 + 49 k tokens; the last answer's end was never stored.
    found = hits(llm) - before
    assert found % 32 == 0 and found >= 32 + 96 + 128
    assert free_pages(llm) == pages


@every_model
def test_many_requests_with_one_prefix(
    model: str, overlapped: bool, room: EngineRoom
) -> None:
    prompts = [SHARED + letters(1 + i % 13, i) for i in range(32)]
    plain = answers(start(room, model, False, overlapped), prompts)
    llm = start(room, model, True, overlapped)
    assert answers(llm, prompts[:1]) == plain[:1]
    before = hits(llm)
    assert answers(llm, prompts) == plain
    assert hits(llm) - before == 32 * 128


@every_model
def test_preemption_finds_its_own_pages(
    model: str, overlapped: bool, room: EngineRoom
) -> None:
    """Also of prompts that come in parts."""
    prompts = [letters(70 + 3 + i, i % 2) for i in range(8)]
    plain = answers(start(room, model, False, overlapped), prompts, 60)
    few = {"num_gpu_blocks_override": 14} | PARTS
    llm = start(room, model, True, overlapped, **few)
    assert scheduler(llm).max_num_scheduled_tokens == PARTS["max_num_batched_tokens"]
    before, pages = num_preemptions(llm), free_pages(llm)
    assert answers(llm, prompts, 60) == plain
    assert num_preemptions(llm) > before
    assert free_pages(llm) == pages


def test_blocks_of_another_length_share_nothing(
    overlapped: bool, room: EngineRoom
) -> None:
    """Keys depend on where blocks end; a length that does not divide a page is refused."""
    wishes = [
        params(20, dllm_block_length=size, dllm_policy="low_confidence")
        for size in (16, 8)
    ]
    llm = start(room, "sdar", False, overlapped)
    plain = [token_ids(generate(llm, [SHARED], wish)[0]) for wish in wishes]
    assert plain[0] != plain[1]
    llm = start(room, "sdar", True, overlapped)
    for wish, tokens in zip([*wishes, *wishes], [*plain, *plain], strict=True):
        assert token_ids(generate(llm, [SHARED], wish)[0]) == tokens
    message = refusal(llm, SHARED, params(20, dllm_block_length=12))
    assert "dllm_block_length 12 does not divide a page of 32 tokens" in message


def test_an_ended_block_is_not_cached(overlapped: bool, room: EngineRoom) -> None:
    """The text ends inside a block that was never fed without masks: its page is not reused."""
    llm = start(room, "sdar", True, overlapped)
    prompt = a_prompt(20, 5)
    wish = params(12, dllm_policy="low_confidence", dllm_steps=1)
    [first] = generate(llm, [prompt], wish)
    assert forwards(first) == 1  # decided at once; prompt and answer fill a page of 32
    before = hits(llm)
    longer = prompt + token_ids(first) + a_prompt(5, 6)
    [output] = generate(llm, [longer], params(20, dllm_policy="low_confidence"))
    assert hits(llm) == before
    llm = start(room, "sdar", False, overlapped)
    [plain] = generate(llm, [longer], params(20, dllm_policy="low_confidence"))
    assert token_ids(output) == token_ids(plain)


def test_pages_that_hold_no_whole_blocks(room: EngineRoom) -> None:
    """Asked for, but not exact: caching is off. The default page is a multiple of the block."""
    odd = {"block_length": 12, "canvas_length": 24}
    llm = room.start("sdar", odd, enable_prefix_caching=True, block_size=32)
    cache = llm.llm_engine.vllm_config.cache_config
    assert cache.enable_prefix_caching is False
    for block, page in ((4, 32), (64, 64)):
        llm = room.start("sdar", {"block_length": block, "canvas_length": 128})
        cache = llm.llm_engine.vllm_config.cache_config
        assert (cache.enable_prefix_caching, cache.block_size) == (True, page)
