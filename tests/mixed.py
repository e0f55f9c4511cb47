"""Requests of one kind or several on a scripted model, with the step compiled or not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from scripted import Loop, Run, one_thread, sampling
from scripted_rows import Hashed

from dllm_plugin.sampling.step import StepTensors

D2F = {
    "strategy": "d2f",
    "block_length": 4,
    "canvas_length": 16,
    "max_active_blocks": 4,
}
BLOCK = {"strategy": "block_diffusion", "block_length": 4, "canvas_length": 8}
ONE_BLOCK = D2F | {"max_active_blocks": 1}
# Policies of requests in the order they come; None leaves the choice to the engine.
ALIKE = (None,) * 10
SEVERAL = (
    None,
    None,
    "threshold",
    "entropy",
    "factor",
    "low_confidence",
    "random",
    *(None,) * 6,
)
AT_ONCE = 5


class Counted:
    """A function that notes how many requests each of its steps had."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.sizes: list[int] = []

    def __call__(self, step: StepTensors, *rest: Any) -> Any:
        self.sizes.append(len(step.slots_R))
        return self.function(step, *rest)


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """No code of other tests; the number of threads is part of what code is specialised for."""
    with one_thread():
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def decode(
    dllm: dict[str, Any],
    shift: bool,
    backend: str | None,
    policies: Sequence[str | None],
) -> tuple[list[Run], list[int]]:
    """Requests of several lengths and temperatures, `AT_ONCE` at most, which come and go.

    With them: how many requests each step had that compiled code decided.
    """
    loop, runs = Loop(dllm, shift, slots=AT_ONCE + 1), []
    decider = loop.sampler.decider
    with torch.inference_mode():
        if backend is not None:
            loop.sampler.compile(backend)
        decider.decide = counted = Counted(decider.decide)
        with torch._dynamo.config.patch(error_on_recompile=backend is not None):
            for i, policy in enumerate(policies):
                while len(loop.running) == AT_ONCE:
                    loop.step()
                options = {"dllm_policy": policy} if policy else {}
                options |= {
                    "dllm_block_length": 4 - i % 3,
                    "seed": i,
                    "temperature": 0.7 * (i % 2),
                }
                params = sampling(20 + i, None if i % 3 else 14, **options)
                runs.append(loop.start([3] * (i + 1), Hashed(i), params, f"{i}"))
                loop.step()
            loop.run()
    return runs, counted.sizes


def check_steps(
    dllm: dict[str, Any], shift: bool, backend: str, policies: Sequence[str | None]
) -> tuple[list[int], int]:
    """Every pass is the same with the step compiled.

    Returns how many requests each compiled step had, and the passes of all requests together.
    """
    with fresh_compiler():
        plain, uncounted = decode(dllm, shift, None, policies)
        compiled, sizes = decode(dllm, shift, backend, policies)
    assert not uncounted
    for one, other in zip(plain, compiled, strict=True):
        assert one.output == other.output and one.passes == other.passes
    return sizes, sum(len(run.passes) for run in plain)


def check_alike(dllm: dict[str, Any], shift: bool, backend: str) -> None:
    """Requests of the engine's policy take compiled code in every pass, however many run."""
    sizes, passes = check_steps(dllm, shift, backend, ALIKE)
    assert len(sizes) > 20 and sum(sizes) == passes
    assert set(sizes) == set(range(1, AT_ONCE + 1))
