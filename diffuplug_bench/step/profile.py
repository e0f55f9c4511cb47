"""Run ``diffuplug bench step --profile``: trace every grid point again after timing it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffuplug_bench.engines import Prompts
from diffuplug_bench.request_loop import Ask, Run, all_decode, serve
from diffuplug_bench.settings import Settings
from diffuplug_bench.step.measure import asks_of
from diffuplug_bench.step.traces import TooFewForwards, gap_share, summarise

if TYPE_CHECKING:
    from vllm import LLM

STEPS = 16  # traced
# In a trace: some steps are in flight when the profiler starts and stops.
MOST_STEPS = 2 * STEPS


class Tracer:
    """Start vLLM's profiler when every request is being decoded, and stop it after `STEPS`."""

    def __init__(self, llm: "LLM", requests: int, name: str) -> None:
        self.llm, self.requests, self.name = llm, requests, name
        self.until: int | None = None
        self.done = False

    def tick(self, run: Run) -> None:
        """Start or stop the profiler; called after every message of the engine."""
        if self.until is None:
            if all_decode(run, self.requests):
                self.llm.start_profile(self.name)
                self.until = len(run.stamps) + STEPS
        elif not self.done and len(run.stamps) >= self.until:
            self.llm.stop_profile()
            self.done = True


def measure(
    llm: "LLM",
    settings: Settings,
    canvas: int,
    prompts: Prompts,
    rows: list[dict[str, Any]],
    folder: Path,
) -> list[dict[str, Any]]:
    """Run the grid points of `rows` again and trace them into `folder`."""
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    full_attention = settings.measured.full_attention
    has_full_graphs = mode is not None and mode.has_full_cudagraphs()
    found = []
    for row in rows:
        asks = asks_of(llm, settings, canvas, prompts, row["requests"])
        timed = row["block_step_ms" if full_attention else "step_ms"]
        refreshes = full_attention and has_full_graphs
        trace = trace_steps(llm, asks, folder, timed, refreshes)
        found.append({"canvas": canvas} | trace)
    return found


def trace_steps(
    llm: "LLM", asks: Sequence[Ask], folder: Path, step_ms: float, refreshes: bool
) -> dict[str, Any]:
    """Serve `asks` at once under the profiler and summarise the first rank's trace.

    Args:
        step_ms: time of the same step without the profiler, which slows the host.
        refreshes: full graphs hold all but refreshes; if every step has some, the idle share is
            all that is found.
    """
    name = f"step-{len(asks)}"
    serve(llm, asks, len(asks), Tracer(llm, len(asks), name).tick)
    files = sorted(folder.glob(f"{name}_*.json"))  # one per rank; they run alike
    if not files:
        raise ValueError("vLLM's profiler left no trace: measure without --profile.")
    events = json.loads(files[0].read_text(encoding="utf-8"))["traceEvents"]
    for file in files:
        file.unlink()
    return summary_of(events, len(asks), step_ms, refreshes)


def summary_of(
    events: list[dict[str, Any]], requests: int, step_ms: float, refreshes: bool
) -> dict[str, Any]:
    """Return a row of the profile; arguments as of :func:`trace_steps`."""
    row = {
        "requests": requests,
        "timed_step_ms": step_ms,
        "whole_trace_gap_share": gap_share(events),
    }
    try:
        summary = summarise(events, MOST_STEPS)
    except TooFewForwards:
        if not refreshes:
            raise
        return row
    host = step_ms - summary.busy_ms
    return row | {
        "timed_gap_ms": host,
        "timed_gap_share": host / step_ms,
        "traced_gap_share": summary.gap_ms / summary.step_ms,
        "busy_share": summary.busy_ms / step_ms,
        "sampler_share": summary.sampler_ms / step_ms,
        **asdict(summary),
    }
