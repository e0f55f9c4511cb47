"""What a step costs the host: counted, since a clock would tell more of what runs beside it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engines import EngineRoom, generate, params
from mixed import fresh_compiler
from scripted import Loop
from test_full_compiled import sampler_of
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dllm_plugin.engine.scheduling import refresh_scheduler
from dllm_plugin.sampling import masked_rows
from dllm_plugin.sampling.step import WARMUP_REQUESTS, Compiled

pytestmark = pytest.mark.slow

BLOCK, BLOCKS = 8, 4
DLLM = {
    "strategy": "dual_cache",
    "block_length": BLOCK,
    "canvas_length": BLOCK * BLOCKS,
}
DLLM |= {"policy": "low_confidence"}
PROMPT = [5, 6, 7, 8, 9]


class Ops(TorchDispatchMode):
    """Count what is asked of the device: views and empty tensors launch nothing."""

    nothing = (
        "view",
        "split",
        "unbind",
        "slice",
        "select",
        "alias",
        "detach",
        "empty",
        "lift",
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not any(word in name for word in self.nothing):
            self.counts[name] += 1
        return func(*args, **kwargs or {})


@contextmanager
def calls_of(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Any]]:
    """Collect the first argument of each call."""
    calls, inner = [], getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0] if args else None)
        return inner(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


def decode(llm: Any) -> int:
    """Decode one request; returns its forwards."""
    wish = params(BLOCK * BLOCKS, dllm_steps=BLOCK, ignore_eos=True)
    (output,) = generate(llm, [PROMPT], [wish])
    return sum(output.outputs[0].spec_decode_metrics.histogram)


def test_where_forwards_lie_is_not_worked_out_in_every_step(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But some times a block: where it begins, and where the next one is launched ahead."""
    llm = room.start("llada", DLLM, async_scheduling=True)
    with calls_of(refresh_scheduler, "bounds", monkeypatch) as calls:
        forwards = decode(llm)
    assert forwards == BLOCK * BLOCKS and len(calls) <= 5 * BLOCKS


def test_rows_are_found_by_one_copy_and_two_gathers(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the plan itself, which is compiled on GPUs."""
    llm = room.start("llada", DLLM, async_scheduling=True)
    rows, ops = sampler_of(llm).rows, Ops()
    choose, begin = rows.choose, rows.begin

    def counted(*args: Any) -> None:
        with ops:
            choose(*args)

    def planned(*args: Any) -> Any:
        with _disable_current_modes():
            return begin(*args)

    monkeypatch.setattr(rows, "choose", counted)
    monkeypatch.setattr(rows, "begin", planned)
    with calls_of(masked_rows, "async_tensor_h2d", monkeypatch) as copies:
        forwards = decode(llm)
    assert len(copies) == forwards
    # Positions and rows at once, and how many keys there are; positions become int32.
    assert ops.counts["index"] == 2 * forwards
    assert set(ops.counts) == {"index", "to", "resolve_conj", "resolve_neg"}


def test_sampling_parameters_are_copied_when_there_are_new_ones(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = room.start("llada", DLLM, async_scheduling=True)
    states = sampler_of(llm).sampling_states
    with calls_of(states, "apply_staged_writes", monkeypatch) as calls:
        decode(llm)
        decode(llm)
    assert len(calls) == 2


@contextmanager
def _without_caches() -> Iterator[None]:
    """Nothing that was compiled before counts."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.mark.parametrize(
    "dllm",
    [
        {"strategy": "block_diffusion"},
        {"strategy": "d2f", "adaptive": "throughput"},
        DLLM,
    ],
    ids=lambda dllm: dllm["strategy"],
)
def test_one_request_is_planned_by_few_kernels(dllm: dict[str, Any]) -> None:
    """Kernels of so few numbers take less time than their launches; torch's code for CPUs."""
    loop, kernels = Loop({"block_length": BLOCK, "canvas_length": 4 * BLOCK} | dllm), []
    rows = loop.sampler.rows
    loop.states.apply_staged_writes()
    with fresh_compiler(), torch.inference_mode(), _without_caches():
        rows.begin = Compiled(rows.begin_step, loop.states)
        for count in WARMUP_REQUESTS:
            metrics.reset()
            rows.example(count)
            kernels.append(metrics.generated_kernel_count)
    one, three = kernels
    assert 0 < one <= min(three, 12)
