"""Lengths at the borders: every max_tokens, prompts up to the end of the context (E9)."""

from engines import MASK_IDS, EngineRoom, a_prompt, generate, params, results
from jobs import job, plain_model, run

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

CONTEXT = 96


def test_every_max_tokens_up_to_three_blocks(
    family: str, overlapped: bool, room: EngineRoom
) -> None:
    llm = room.start(family, async_scheduling=overlapped, max_model_len=CONTEXT)
    jobs = [job(11, n, 8, seed=1, threshold=0.6) for n in range(1, 25)]
    for one, (tokens, forwards) in zip(jobs, run(llm, jobs), strict=True):
        assert len(tokens) == one.max_tokens
        assert (tokens, forwards) == one.expected(family, CONTEXT), one.max_tokens


def test_the_context_ends_inside_a_block(
    family: str, overlapped: bool, room: EngineRoom
) -> None:
    llm = room.start(family, async_scheduling=overlapped, max_model_len=CONTEXT)
    lengths = [95, 94, 90, 88, 81, 80, 79, 65, 64, 63, 40]
    jobs = [job(length, 200, 16, seed=length, threshold=0.7) for length in lengths]
    for one, (tokens, forwards) in zip(jobs, run(llm, jobs), strict=True):
        assert len(tokens) == CONTEXT - len(one.prompt)
        assert MASK_IDS[family] not in tokens
        assert (tokens, forwards) == one.expected(family, CONTEXT), len(one.prompt)


def test_blocks_longer_than_what_is_left(overlapped: bool, room: EngineRoom) -> None:
    llm = room.start("llada", async_scheduling=overlapped, max_model_len=CONTEXT)
    jobs = [
        job(90, 6, 32),
        job(64, 32, 32, seed=1),
        job(63, 33, 32, seed=2),
        job(1, 95, 64),
    ]
    for one, got in zip(jobs, run(llm, jobs), strict=True):
        assert got == one.expected("llada", CONTEXT), one


def test_block_diffusion_at_the_end(
    family: str, overlapped: bool, room: EngineRoom
) -> None:
    strategy = {"strategy": "block_diffusion", "block_length": 16}
    llm = room.start(family, strategy, overlapped, max_model_len=CONTEXT)
    lengths = [95, 93, 80, 79, 72, 64, 50]
    prompts = [a_prompt(length, length) for length in lengths]
    numbers = {"policy": "low_confidence", "steps": 5}
    wish = params(200, **{f"dllm_{key}": value for key, value in numbers.items()})
    got = results(generate(llm, prompts, wish))
    for prompt, (tokens, forwards) in zip(prompts, got, strict=True):
        rules = Rules("block_diffusion", block_length=16, **numbers)
        text = Text(plain_model(family), prompt, 200, rules, (), CONTEXT)
        assert (tokens, forwards) == decode(text), len(prompt)
