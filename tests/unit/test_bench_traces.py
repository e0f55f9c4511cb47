"""Split profiler traces of steps without an engine: kernels, gaps, and exchange between ranks."""

from dataclasses import asdict
from typing import Any

import pytest

from diffuplug_bench.step import traces
from diffuplug_bench.step.profile import MOST_STEPS, summary_of
from diffuplug_bench.step.traces import gap_share


def summarise(events: list[dict[str, Any]]) -> traces.Summary:
    return traces.summarise(events, MOST_STEPS)


def launch(number: int, time: float) -> dict[str, Any]:
    return event("cuda_runtime", "cudaGraphLaunch", time, 5.0, number)


def event(
    kind: str, name: str, time: float, length: float, number: int
) -> dict[str, Any]:
    args = {"correlation": number}
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": time,
        "dur": length,
        "args": args,
    }


def a_trace(steps: int) -> list[dict[str, Any]]:
    """Steps of 1,000 us: 595 forward in two kernels, 100 head, 150 sampler, 10 copy, 145 idle."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {}}]
    for i in range(steps):
        at, graph = 1000.0 * i, 10 * i
        events += [launch(graph, at - 50), event("kernel", "norm", at, 195, graph)]
        events += [event("kernel", "sm90_gemm", at + 200, 400, graph)]
        events += [event("kernel", "nvjet_hsh_128", at + 640, 100, graph + 1)]
        events += [event("kernel", "propose", at + 740, 100, graph + 2)]
        events += [event("kernel", "pick", at + 850, 50, graph + 3)]
        events += [event("gpu_memcpy", "Memcpy DtoH", at + 900, 10, graph + 4)]
        # A small graph of someone else.
        events += [
            launch(graph + 5, at + 860),
            event("kernel", "tiny", at + 990, 0, graph + 5),
        ]
    return events


def test_trace_is_split_by_what_launched_a_kernel() -> None:
    summary = summarise(a_trace(5))
    assert summary.steps == 4
    parts = (
        summary.forward_ms,
        summary.lm_head_ms,
        summary.sampler_ms,
        summary.copy_ms,
    )
    assert parts == pytest.approx((0.595, 0.1, 0.15, 0.01))
    assert summary.step_ms == pytest.approx(1.0)
    assert summary.busy_ms == pytest.approx(sum(parts))
    assert summary.gap_ms == pytest.approx(0.145)
    assert summary.forward_gap_ms == pytest.approx(0.005)
    assert summary.kernels == 5 and summary.forward_kernels == 2
    assert summary.forward_largest == pytest.approx({"sm90_gemm": 0.4, "norm": 0.195})
    assert list(summary.largest) == [
        "nvjet_hsh_128",
        "propose",
        "pick",
        "Memcpy DtoH",
        "tiny",
    ]


def test_overlapping_kernels_are_busy_once() -> None:
    events = a_trace(5)
    events += [event("kernel", "side", 1000.0 * i + 700, 60, 900 + i) for i in range(5)]
    summary = summarise(events)
    assert summary.busy_ms == pytest.approx(
        0.855
    ) and summary.sampler_ms == pytest.approx(0.21)


def test_steps_that_a_refresh_ran_in_are_left_out() -> None:
    """It is launched in pieces, between two graphs of a forward."""
    pieces = [
        event("kernel", f"gemm_{k}", 2700 + 30 * k, 25, 800 + k) for k in range(20)
    ]
    later = [
        event(
            e["cat"],
            e["name"],
            e["ts"] + 3500,
            e["dur"],
            e["args"]["correlation"] + 1000,
        )
        for e in a_trace(3)
        if "cat" in e
    ]
    found = asdict(summarise(a_trace(3) + pieces + later))
    wanted = asdict(summarise(a_trace(5)))
    assert found.pop("steps") == wanted.pop("steps") == 4
    for largest in ("largest", "forward_largest"):
        assert found.pop(largest) == pytest.approx(wanted.pop(largest))
    assert found == pytest.approx(wanted)


def test_exchange_between_ranks_stands_apart() -> None:
    events = a_trace(5)
    events += [
        event("kernel", "ncclDevKernel_x", 1000.0 * i + 910, 40, 900 + i)
        for i in range(5)
    ]
    summary = summarise(events)
    assert summary.exchange_ms == pytest.approx(
        0.04
    ) and summary.sampler_ms == pytest.approx(0.15)


def test_a_trace_without_graphs_is_refused() -> None:
    eager = [e for e in a_trace(5) if e["name"] != "cudaGraphLaunch"]
    with pytest.raises(ValueError, match="holds 0 replays"):
        summarise(eager)


def test_steps_that_all_hold_refreshes_have_an_idle_share() -> None:
    """Their forwards have no full graph, so it is that of the trace."""
    eager = [e for e in a_trace(5) if e["name"] != "cudaGraphLaunch"]
    assert gap_share(eager) == pytest.approx(0.145 * 4 / 4.99 + 0.135 / 4.99, abs=1e-9)
    row = summary_of(eager, 64, 1.0, refreshes=True)
    assert row == {
        "requests": 64,
        "timed_step_ms": 1.0,
        "whole_trace_gap_share": gap_share(eager),
    }
    with pytest.raises(ValueError, match="holds 0 replays"):
        summary_of(eager, 64, 1.0, refreshes=False)
    with pytest.raises(ValueError, match="holds no kernels"):
        gap_share(a_trace(0))
    full = summary_of(a_trace(5), 1, 1.0, refreshes=True)
    assert full["whole_trace_gap_share"] == gap_share(eager)
    assert full["traced_gap_share"] == pytest.approx(0.145)


def test_piecewise_graphs_are_refused() -> None:
    """Each forward replays one for every layer, all of about the same size."""
    with pytest.raises(
        ValueError, match="holds 33 replays .* at most 32 steps.*--requests"
    ):
        summarise(a_trace(33))
