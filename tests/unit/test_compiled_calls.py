"""Calls of compiled code: torch compares once for each lengths, and never serves other steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mixed import AT_ONCE, BLOCK, D2F, fresh_compiler
from scripted import Loop, sampling
from scripted_rows import Hashed

from dllm_plugin.kernels.confidence.reference import RowStats
from dllm_plugin.sampling import step
from dllm_plugin.sampling.step import Compiled

FLOATING = BLOCK | {"adaptive": "throughput"}
ROWS = 7


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with fresh_compiler(), torch.inference_mode():
        yield


@contextmanager
def compared(compiled: Compiled) -> Iterator[list[int]]:
    """Count torch's own calls."""
    calls, inner = [], compiled.compared

    def call(*arguments: Any) -> Any:
        calls.append(len(arguments[0]))
        return inner(*arguments)

    compiled.compared = call
    yield calls
    compiled.compared = inner


def begun(loop: Loop, count: int, places: int = 2) -> Any:
    """Plan a step of some slots."""
    slots_R = torch.arange(count)
    bounds = places * torch.arange(count + 1, dtype=torch.int32)
    return loop.sampler.rows.begin(slots_R, bounds[:count], bounds[1:])


def decided(loop: Loop, count: int, rows: int = ROWS) -> Any:
    """Decide a step that proposes token 3 everywhere."""
    tensors = loop.sampler.rows.example(count)
    token_T = torch.full((rows,), 3)
    stats = RowStats(token_T, torch.ones(rows), torch.zeros(rows, dtype=torch.int32))
    decider = loop.sampler.decider
    return decider.decide(tensors, stats, decider.compiled_for)


def tensors_of(value: Any) -> list[torch.Tensor]:
    return list(step._tensors_in([value]))


def compiled_loop(dllm: dict[str, Any], **options: Any) -> Loop:
    loop = Loop(dllm, slots=AT_ONCE + 1, **options)
    loop.states.apply_staged_writes()
    loop.sampler.compile("eager")
    return loop


def test_each_number_of_requests_is_compared_once() -> None:
    loop = compiled_loop(D2F)
    begin: Any = loop.sampler.rows.begin
    assert not begin.found and not loop.sampler.decider.decide.found  # type: ignore[attr-defined]
    with compared(begin) as calls:
        for count in (1, 1, 4, 3, 4, 1, 3):
            found = tensors_of(begun(loop, count))
            plain = tensors_of(
                loop.sampler.rows.begin_step(*_arguments(count))  # type: ignore[call-arg, arg-type]
            )
            for one, other in zip(found, plain, strict=True):
                assert torch.equal(one, other)
    assert calls == [1, 4, 3]


def _arguments(count: int) -> tuple[torch.Tensor, ...]:
    bounds = 2 * torch.arange(count + 1, dtype=torch.int32)
    return torch.arange(count), bounds[:count], bounds[1:]


def test_each_number_of_rows_is_compared_once() -> None:
    loop = compiled_loop(D2F)
    with compared(loop.sampler.decider.decide) as calls:  # type: ignore[arg-type]
        for rows in (ROWS, ROWS + 1, ROWS):
            decided(loop, 2, rows)
    assert len(calls) == 2


def test_a_context_that_is_lowered_is_compared_again() -> None:
    """As vLLM does after the memory profile: code of floating canvases is made for a context."""
    loop = compiled_loop(FLOATING)
    with compared(loop.sampler.rows.begin) as calls:  # type: ignore[arg-type]
        before = tensors_of(begun(loop, 2))
        begun(loop, 2)
        loop.model_config.max_model_len = 3
        after = tensors_of(begun(loop, 2, 8))
        plain = tensors_of(
            loop.sampler.rows.begin_step(  # type: ignore[call-arg, arg-type]
                torch.arange(2),
                *(8 * torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)),
            )
        )
    assert len(calls) == 2 and len(before) == len(after)
    for one, other in zip(after, plain, strict=True):
        assert torch.equal(one, other)


def test_a_rule_that_is_exchanged_is_compiled_anew() -> None:
    """As benchmarks do, which accept by random numbers."""
    loop = compiled_loop(D2F)
    run = loop.start([1, 2], Hashed(0), sampling(24, None))
    decider = loop.sampler.decider
    canvas_C = loop.states.canvas_NC[run.slot]

    def masks_after(steps: int) -> int:
        for _ in range(steps):
            loop.step()
        return int((canvas_C == loop.mask).sum())

    before = masks_after(2)
    assert masks_after(1) < before
    for name in decider.policy_rules:
        decider.policy_rules[name] = lambda plan, *_: plan.candidates_RC & False
    decider.forget()
    before = masks_after(0)
    assert masks_after(2) == before > 0


def test_engines_do_not_share_what_they_found() -> None:
    loops = [compiled_loop(D2F), compiled_loop(BLOCK)]
    for loop in loops + loops:
        places = loop.states.num_positions
        planned, _, _ = begun(loop, 2, places)
        tokens_RC = planned.canvas.tokens_RC
        assert tokens_RC.shape[1] == places
        loop.states.canvas_NC[:2] = torch.randint(3, 9, tokens_RC.shape)
        planned, _, _ = begun(loop, 2, places)
        assert torch.equal(planned.canvas.tokens_RC, loop.states.canvas_NC[:2])


def test_what_was_found_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "FOUND_AT_MOST", 2)
    loop = compiled_loop(D2F)
    begin: Any = loop.sampler.rows.begin
    for count in (1, 2, 3, 4, 3):
        begun(loop, count)
        assert 0 < len(begin.found) <= 2


def test_without_a_compiler_the_method_itself_is_called() -> None:
    loop = Loop(D2F)
    loop.states.apply_staged_writes()
    with torch.compiler.set_stance("force_eager"):
        begin = Compiled(loop.sampler.rows.begin_step, loop.states, "eager")
        loop.sampler.rows.begin = begin
        begun(loop, 2)
        assert list(begin.found.values()) == [begin.compared]
        begun(loop, 2)
