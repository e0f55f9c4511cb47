"""Whatever else is in the batch, a request gets its own tokens in its own number of steps."""

import random
from typing import Any

import pytest
import torch
from engines import (
    EngineRoom,
    a_prompt,
    at_most,
    forwards,
    generate,
    params,
    scheduler,
    step_through,
    token_ids,
)
from jobs import MIXED, check, d2f_rules, job, plain_model
from test_full_compiled import sampler_of
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.memory import reserved_bytes, step_size
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.text import Text


def test_a_mixed_batch(family: str, overlapped: bool, llm: Any) -> None:
    check(llm, family, MIXED)


def test_each_alone(family: str, overlapped: bool, llm: Any) -> None:
    for one in MIXED[::3]:
        check(llm, family, [one])


def test_one_more_request_every_step(family: str, overlapped: bool, llm: Any) -> None:
    """E1: prefills of some requests share forwards with canvases of others."""
    arrivals = {
        i: [(str(i), list(one.prompt), one.wish())] for i, one in enumerate(MIXED)
    }
    done = step_through(llm, arrivals)
    for i, one in enumerate(MIXED):
        got = token_ids(done[str(i)]), forwards(done[str(i)])
        assert got == one.expected(family), one


def test_equal_total_lengths_in_another_composition(overlapped: bool, llm: Any) -> None:
    """E1: nothing is remembered by the shape of a batch."""
    check(llm, "llada", [job(10, 32, seed=1), job(30, 32, seed=2)])
    check(llm, "llada", [job(30, 32, seed=3), job(10, 32, seed=4)])
    check(llm, "llada", [job(20, 32, seed=5), job(20, 32, seed=6)])


def test_at_most_so_many_run_at_once(llm: Any) -> None:
    """A knob of the tests: fewer requests in flight without an engine of their own."""
    engine = llm.llm_engine
    with at_most(llm, 2):
        for i, one in enumerate(MIXED[:4]):
            engine.add_request(
                str(i), {"prompt_token_ids": list(one.prompt)}, one.wish()
            )
        running = []
        while engine.has_unfinished_requests():
            engine.step()
            running.append(len(scheduler(llm).running))
    assert max(running) == 2


def test_many_more_requests_than_slots(overlapped: bool, room: EngineRoom) -> None:
    llm = room.start("dream", async_scheduling=overlapped, max_num_seqs=3)
    check(
        llm, "dream", [job(3 + i, 20 + i, 8, seed=i, threshold=0.5) for i in range(12)]
    )


def test_a_prompt_beyond_the_token_budget_is_not_split(
    family: str, room: EngineRoom
) -> None:
    """E6: the result is that of the whole prompt in one piece."""
    llm = room.start(family, max_num_batched_tokens=64, max_num_seqs=4)
    check(
        llm,
        family,
        [job(150, 24, seed=1), job(200, 24, seed=2), job(63, 24), job(64, 24)],
    )


def test_prefix_caching_changes_nothing(family: str, room: EngineRoom) -> None:
    """E5: the KV of a bidirectional prompt's first page depends on its last token."""
    llm = room.start(family, enable_prefix_caching=True, block_size=32)
    shared = job(70, 24).prompt
    first, second = (job(10, 24, seed=seed).prompt for seed in (1, 2))
    for prompt in (shared + first, shared + second, shared + first):
        wanted = job(1, 24)
        check(llm, family, [type(wanted)(prompt, 24)])


def test_number_of_open_blocks_changes(family: str, overlapped: bool, llm: Any) -> None:
    """E8: with block_add_threshold 0 a block opens every step until the canvas is full."""
    check(
        llm,
        family,
        [job(5 + i, 40, 4, seed=i, block_add_threshold=0.0) for i in range(4)],
    )


def test_a_slow_tail_is_not_cut(family: str, llm: Any) -> None:
    """E10: however few tokens a step brings, the request gets all of them."""
    check(
        llm,
        family,
        [job(9, 64, 8, seed=3, threshold=1.0), job(9, 64, 8, threshold=0.3)],
    )


def run_numbers(llm: Any, wanted: list[tuple[list[int], int, int, Any]]) -> list[Any]:
    """Outputs of (prompt, max_tokens, block_length, numbers) jobs in one batch."""
    wishes = [
        params(
            tokens,
            dllm_block_length=size,
            **{f"dllm_{k}": v for k, v in numbers.items()},
        )
        for _, tokens, size, numbers in wanted
    ]
    return generate(llm, [prompt for prompt, *_ in wanted], wishes)


def test_random_settings(family: str, llm: Any) -> None:
    """E14: whatever the numbers, unless a decision is too close to call in float32."""
    draw, wanted = random.Random(family), []
    for seed in range(32):
        numbers = {
            "threshold": draw.choice([0.3, 0.6, 0.9, 1.0]),
            "block_add_threshold": draw.choice([0.0, 0.1, 0.5, 0.9, 1.0]),
            "decoded_token_threshold": draw.choice([0.0, 0.5, 0.9, 1.0]),
            "policy": draw.choice(["threshold", "entropy", "topk_margin"]),
        }
        prompt = a_prompt(draw.randint(1, 70), seed)
        wanted.append(
            (prompt, draw.randint(1, 48), draw.choice([1, 2, 4, 8, 13, 32]), numbers)
        )
    outputs, compared = run_numbers(llm, wanted), 0
    for (prompt, tokens, size, numbers), output in zip(wanted, outputs, strict=True):
        text = Text(plain_model(family), prompt, tokens, d2f_rules(size, **numbers))
        decode(text)
        if text.margin > 3e-4:
            got = token_ids(output), forwards(output)
            assert got == text.result(), (numbers, size)
            compared += 1
    assert compared >= 16


@pytest.mark.parametrize(("canvas", "blocks"), [(32, None), (40, None), (64, 2)])
def test_a_bounded_canvas(canvas: int, blocks: int | None, room: EngineRoom) -> None:
    """A block that does not fit waits until an earlier one has been stored."""
    bounds = {"strategy": "d2f", "block_length": 16, "canvas_length": canvas}
    llm = room.start(
        "dream", bounds | ({"max_active_blocks": blocks} if blocks else {})
    )
    wanted: list[tuple[list[int], int, int, Any]] = [
        (a_prompt(10 + i, i), 90, size, {"threshold": 0.6, "block_add_threshold": add})
        for i, (size, add) in enumerate(
            [(16, 0.1), (8, 0.0), (13, 0.5), (32, 0.1), (16, 1.0)]
        )
    ]
    outputs = run_numbers(llm, wanted)
    for (prompt, tokens, size, numbers), output in zip(wanted, outputs, strict=True):
        bounds = {"canvas_length": canvas, "max_active_blocks": blocks or 8}
        rules = d2f_rules(size, **bounds, **numbers)
        text = decode(Text(plain_model("dream"), prompt, tokens, rules))
        assert (token_ids(output), forwards(output)) == text, size


def test_priorities(room: EngineRoom) -> None:
    """Who goes first changes nothing, also when it takes pages from those who started."""
    llm = room.start(
        "llada", scheduling_policy="priority", block_size=32, num_gpu_blocks_override=14
    )
    prompts = [{"prompt_token_ids": list(one.prompt)} for one in MIXED]
    outputs = llm.generate(
        prompts,
        [one.wish() for one in MIXED],
        use_tqdm=False,
        priority=[5, 0, 4, 1, 3, 2, 9, 8],
    )
    for one, output in zip(MIXED, outputs, strict=True):
        assert (token_ids(output), forwards(output)) == one.expected("llada"), one


class Reserved(TorchDispatchMode):
    """The bytes of the largest tensor of bytes that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if result.dtype == torch.uint8:
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


def test_doctor_computes_what_the_engine_reserves(llm: Any) -> None:
    """From the configuration, before there is an engine: logits, copies and tables."""
    vllm_config, sampler = llm.llm_engine.vllm_config, sampler_of(llm)
    size = step_size(vllm_config, get_decode_config(vllm_config))
    assert sampler.size == size
    assert (size.slots, size.positions) == sampler.states.canvas_NC.shape
    assert size.logit_bytes == vllm_config.model_config.dtype.itemsize
    with Reserved() as reserved:
        sampler._reserve_peak()
    assert reserved.num_bytes == reserved_bytes(size) > size.rows * size.vocab * 4
