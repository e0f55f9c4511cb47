"""Run ``diffuplug bench step``: time one denoising step in the running engine.

All requests are decoded at once on a fixed schedule, so every engine step computes every canvas;
under full attention, blocks of some requests and refreshes of others. The time of a step is the
duration of a window of such steps, divided by their number. The window starts after the last prompt
and ends before the first request does.
"""

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from diffuplug_bench.engines import Prompts, decoding, on_cpu
from diffuplug_bench.model_shapes import Sizes
from diffuplug_bench.request_loop import Ask, Run, Window, serve, steady_window
from diffuplug_bench.settings import Settings
from diffuplug_bench.step.counts import Count
from diffuplug_bench.step.floor import Floor
from diffuplug_bench.step.memory import logits_bytes, temporary_bytes
from diffuplug_bench.step.schedule import arguments
from diffuplug_bench.step.sizes import all_forwards, run_again, sizes_of

if TYPE_CHECKING:
    from vllm import LLM

STEPS_PER_BLOCK = 8  # for any block length: a step costs the same whatever their number
MEMORY_BLOCKS = 1  # blocks of the run that measures memory
AR_STEPS = 48
LEAST_BUDGET = 2048  # tokens of a step, vLLM's smallest default
SHIFT = 1.5  # prompts share steps with requests that decode, so they take more steps


def plan(
    settings: Settings,
    canvas: int,
    requests: int,
    budget: int,
    measured: int | None = None,
) -> tuple[int, int]:
    """Return the prompt length and the output length of a grid point.

    Args:
        budget: tokens of a step; prompts beyond it start later.
        measured: blocks during which all requests run; default: as many as are timed.
    """
    per_block = steps_per_block(settings, canvas)
    measured = measured or settings.measured.timed_blocks
    late = int(SHIFT * requests * settings.context / budget / per_block) + 1
    block = settings.block(canvas)
    before = block * (1 + late) + block * measured // 2
    return max(1, settings.context - before), block * (2 + late + measured)


def steps_per_block(settings: Settings, canvas: int) -> int:
    """Return the number of denoising steps that unmask a block."""
    block = settings.block(canvas)
    return block if settings.measured.by_confidence else min(STEPS_PER_BLOCK, block)


def sampling(settings: Settings, canvas: int) -> dict[str, Any]:
    """Return request arguments under which every block takes the same number of steps."""
    if settings.measured.by_confidence:
        # No confidence exceeds 1, so each step unmasks one position; every block opens at once.
        return {"dllm_threshold": 1.0, "dllm_block_add_threshold": 0.0}
    return arguments(settings.schedule, steps_per_block(settings, canvas))


def context_needed(settings: Settings) -> int:
    """Return the context that every grid point fits into."""
    lengths = []
    for canvas in settings.canvas:
        for requests in settings.grid_requests(canvas):
            prompt, output = plan(settings, canvas, requests, LEAST_BUDGET)
            lengths.append(max(prompt, settings.context) + output + 2 * canvas)
    return max(lengths)


def asks_of(
    llm: "LLM",
    settings: Settings,
    canvas: int,
    prompts: Prompts,
    requests: int,
    measured: int | None = None,
) -> list[Ask]:
    """Return the requests of a grid point; `measured` as in :func:`plan`."""
    budget = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    prompt, output = plan(settings, canvas, requests, budget, measured)
    extra = sampling(settings, canvas)
    return prompts.several(requests, prompt, max_tokens=output, extra_args=extra)


def measure(
    llm: "LLM",
    settings: Settings,
    canvas: int,
    prompts: Prompts,
    tell: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Measure each number of requests; return one row for each.

    Args:
        tell: called with each row as soon as its times are known.
    """
    rows = []
    for requests in settings.grid_requests(canvas):
        asks = asks_of(llm, settings, canvas, prompts, requests)
        run = serve(llm, asks, requests)
        _check(run, asks[0].sampling["max_tokens"], settings, canvas)
        row: dict[str, Any] = {"requests": requests, "canvas": canvas}
        row |= _times(run) | {
            "tokens_per_forward": run.tokens / run.forwards,
            "positions_per_token": run.canvas_positions / run.tokens,
        }
        if settings.measured.full_attention:
            row["block_step_ms"] = median_step_ms(run)
        row["forwards_per_s"] = requests * row["steps_per_second"]
        tell(row)
        row |= _positions(llm, settings, canvas, asks, run)
        sharded = decoding(llm)["vocab_parallel"]
        row["logits_mb"] = logits_bytes(llm, row.pop("logits_rows"), sharded) / 1e6
        if not on_cpu():
            # In a second run, because the calls to the workers take time.
            asks = asks_of(llm, settings, canvas, prompts, requests, MEMORY_BLOCKS)
            row["temporary_mb"] = temporary_bytes(llm, asks) / 1e6
        rows.append(row)
    return rows


def _positions(
    llm: "LLM", settings: Settings, canvas: int, asks: list[Ask], run: Run
) -> dict[str, Any]:
    """Return the positions of a step and its most logits rows; if steps differ, their sizes.

    Under full attention a step has the most rows if all of its forwards begin a block.
    """
    requests = len(asks)
    if not settings.measured.full_attention:
        alone_from = decoding(llm)["commit_alone_from"]
        positions = settings.positions_of_step(canvas, requests, alone_from)
        return {"positions": positions, "logits_rows": positions}
    again = run_again(llm, asks, requests)
    window = steady_window(again)
    forwards = []
    for forward in all_forwards(llm, again):
        if window.first < forward.step <= window.last:
            forwards.append(forward)
    counts = _counts(run, steady_window(run))
    sizes = sizes_of(counts, forwards)
    most_rows = max(one.size.rows for one in forwards)
    return {
        "positions": round(statistics.mean(size.positions for size in sizes)),
        "logits_rows": most_rows * max(count.forwards for count in counts),
        "step_sizes": sizes,
    }


def measure_autoregressive(
    llm: "LLM", settings: Settings, prompts: Prompts
) -> dict[int, dict[str, Any]]:
    """Measure plain vLLM's steps, each of which brings every request one token, by requests."""
    budget = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    rows = {}
    for requests in settings.requests:
        output = AR_STEPS + int(2 * SHIFT * requests * settings.context / budget) + 4
        prompt = max(1, settings.context - output + AR_STEPS // 2)
        asks = prompts.several(requests, prompt, max_tokens=output)
        rows[requests] = _times(serve(llm, asks, requests))
    return rows


def median_step_ms(run: Run) -> float:
    """Return the median step: that of forwards of a block each, if few of them are refreshes."""
    window = steady_window(run)
    stamps = run.stamps[window.first : window.last + 1]
    steps = [b - a for a, b in pairwise(stamps)]
    return 1e3 * statistics.median(steps)


def _counts(run: Run, window: Window) -> list[Count]:
    return run.counts[window.first + 1 : window.last + 1]


def _times(run: Run) -> dict[str, Any]:
    """Return the columns that every engine has.

    If the engine counts positions, messages of steps that computed nothing are no steps.
    """
    window = steady_window(run)
    messages = window.last - window.first
    steps = sum(count.positions > 0 for count in _counts(run, window)) or messages
    scale = messages / steps
    return {
        "steps": steps,
        "context": round(_context(run, window)),
        "step_ms": window.step_ms * scale,
        "step_ms_spread": [scale * ms for ms in window.spread_ms],
        "steps_per_second": 1e3 / window.step_ms / scale,
    }


def _context(run: Run, window: Window) -> float:
    """Return the tokens before the canvas, averaged over requests, halfway through the window."""
    middle = (window.first + window.last) / 2
    tokens = 0
    for answer in run.answers:
        tokens += len(answer.prompt)
        tokens += sum(a.tokens for a in answer.arrivals if a.step <= middle)
    return tokens / len(run.answers)


def _check(run: Run, output: int, settings: Settings, canvas: int) -> None:
    """Raise ValueError unless every request ran its whole schedule without a pause.

    Under full attention a refresh that does not fit a step waits; what is computed is counted.
    """
    for answer in run.answers:
        assert len(answer.token_ids) == output
        if settings.measured.full_attention:
            continue
        span = answer.arrivals[-1].step - answer.arrivals[0].step
        # A finished block arrives with the first step of the next block.
        expected = answer.forwards - steps_per_block(settings, canvas) - 1
        if span == settings.pipeline_parallel_size * expected != expected:
            raise ValueError(
                "a request waits for its last stage before its next step, as vLLM does without "
                "asynchronous scheduling (CPUs): measure one stage, or in the mode throughput."
            )
        if span != expected:
            raise ValueError(
                f"a request took {span} engine steps for {expected} denoising steps: it was "
                "preempted; raise --gpu-memory-utilization, or lower --requests or --context."
            )


def add_floor(row: dict[str, Any], floor: Floor, sizes: Sizes) -> dict[str, Any]:
    """Add the floor to a row."""
    requests, positions = row["requests"], row["positions"]
    steps = row.pop("step_sizes", None)
    if steps is None:
        gemms, kv = floor.step_ms(sizes, positions, requests * row["context"])
    else:
        gemms, kv = (total / len(steps) for total in floor.steps_ms(sizes, steps))
    share = (gemms + kv) / row["step_ms"]
    limits = {"gemm_ms": gemms, "kv_ms": kv, "floor_ms": gemms + kv}
    shares = {"share_of_floor": share, "times_gemms": row["step_ms"] / gemms}
    return row | limits | shares


def add_baseline(
    row: dict[str, Any], ar: dict[int, dict[str, Any]] | None
) -> dict[str, Any]:
    """Add the autoregressive step of as many requests to a row, if it was measured."""
    if ar is None:
        return row
    theirs = ar[row["requests"]]["step_ms"]
    return row | {"ar_step_ms": theirs, "times_ar_step": row["step_ms"] / theirs}
