"""Run ``diffuplug bench step | throughput | latency | all``, from the gate to the JSON line."""

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from diffuplug_bench import (
    engines,
    floor,
    gate,
    published_loops,
    report,
    step,
    throughput_latency,
)
from diffuplug_bench.engines import Model, Prompts
from diffuplug_bench.model_shapes import Sizes, autoregressive_config
from diffuplug_bench.request_loop import Answer
from diffuplug_bench.settings import Settings
from dllm_plugin.commands.offline import stop_engine
from dllm_plugin.config.cuda_graphs import warm_up_context

Result = TypeVar("Result")
MOST_POSITIONS = (
    16384  # of a step whose floor is timed; larger ones take time in proportion
)


def run(
    settings: Settings, command: Sequence[str], reference: Path | None = None
) -> int:
    """Run gate, floor, engines and baselines; return 1 if the gate is red.

    Args:
        reference: as in :func:`gate.check`.
    """
    engines.prepare()
    progress = report.Progress()
    line: dict[str, Any] = report.surroundings(settings, command) | {"gate": "green"}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        scratch = Path(folder)
        model = engines.find_model(settings, scratch)
        _check(settings, model)
        settings = engines.with_dtype(settings, model, _length(settings, model))
        verdicts = []
        for canvas in settings.canvas:
            verdicts.append(gate.check(settings, canvas, reference))
            progress.done(f"gate, canvas {canvas}", verdicts[-1].sentence)
            if not verdicts[-1].green:
                line |= {"gate": "red", "problem": verdicts[-1].sentence}
                line |= {
                    "gates": [v.record for v in verdicts],
                    "seconds": progress.seconds,
                }
                print(json.dumps(line))
                return 1
        line["gates"] = [verdict.record for verdict in verdicts]
        line |= _measure(settings, model, scratch, progress)
    print(json.dumps(line | {"seconds": progress.seconds}))
    return 0


def in_own_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a new process, which gives the GPU's memory back; on a CPU in this one.

    This process must not initialise CUDA, or the engines that it starts could not be forked.
    """
    if engines.on_cpu():
        return function(*arguments)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _measure(
    settings: Settings, model: Model, scratch: Path, progress: report.Progress
) -> dict[str, Any]:
    """Measure floor, our engines and baselines, one after the other; print the tables."""
    sizes = Sizes.of(model.config).per_rank(settings.tensor_parallel_size)
    length = _length(settings, model)
    prompts = Prompts(model.config, settings.seed)
    limit = _measure_floor(settings, model, sizes)
    progress.done("floor")
    result: dict[str, Any] = {"floor": limit.record(), "engines": []}
    steps: list[dict[str, Any]] = []
    served: list[tuple[dict[str, Any], list[Answer]]] = []
    traces: list[dict[str, Any]] = []
    trace_folder = scratch if settings.profile else None
    for canvas in settings.canvas:
        llm = engines.start_ours(settings, model, canvas, length, trace_folder)
        result["engines"].append(engines.describe(llm))
        progress.done(f"engine start, canvas {canvas}")
        if settings.measures_steps:
            rows = step.measure(
                llm, settings, canvas, prompts, partial(report.tell, "step")
            )
            steps += [step.add_floor(row, limit, sizes) for row in rows]
            progress.done(f"steps, canvas {canvas}", report.table_of("step", steps))
            if settings.profile:
                traces += step.profile(llm, settings, canvas, prompts, rows, scratch)
                progress.done(
                    f"profile, canvas {canvas}", report.table_of("profile", traces)
                )
        if settings.request_modes:
            tell = partial(report.tell, "served")
            served += throughput_latency.measure(
                llm, settings, model, canvas, prompts, tell
            )
            found = report.table_of("served", [row for row, _ in served])
            progress.done(f"requests, canvas {canvas}", found)
        stop_engine(llm)
        del llm  # the next start takes what is still there out of collections
    ar_steps, ar_served = None, None
    if "ar" in settings.versus:
        compiled = result["engines"][-1]["compilation_mode"] != "NONE"
        llm = engines.start_autoregressive(settings, model, length, scratch, compiled)
        progress.done("engine start, plain vLLM")
        result["ar"] = {"engine": engines.describe(llm)}
        if settings.measures_steps:
            ar_steps = result["ar"]["step"] = step.measure_autoregressive(
                llm, settings, prompts
            )
        ar_served = result["ar"]["served"] = throughput_latency.measure_autoregressive(
            llm, served
        )
        stop_engine(llm)
        progress.done("plain vLLM", _of_both(settings, compiled))
    published = None
    if "hf" in settings.versus:
        published = result["hf"] = _measure_published(settings, model, prompts)
        progress.done("the model's own loop")
    result["step"] = [step.add_baseline(row, ar_steps) for row in steps]
    result["served"] = []
    for i, (row, _) in enumerate(served):
        ar = ar_served[i] if ar_served else None
        row = throughput_latency.add_baselines(row, limit, sizes, ar, published)
        result["served"].append(row)
    result["profile"] = traces
    for name in report.COLUMNS:
        if result.get(name):
            print(f"{name}:\n{report.table_of(name, result[name])}", flush=True)
    return {name: found for name, found in result.items() if found}


def _measure_floor(settings: Settings, model: Model, sizes: Sizes) -> floor.Floor:
    """Measure the floor at every number of positions that a step of the grid may compute."""
    if settings.measured.full_attention:
        rows = max(
            max(settings.grid_requests(c)) * settings.block(c) for c in settings.canvas
        )
        most = max(settings.requests) * _length(settings, model)
        wanted = floor.Wanted((), (min(most, MOST_POSITIONS), rows))
        return in_own_process(floor.measure, sizes, wanted, *_device(settings))
    grid = set()
    for canvas in settings.canvas:
        # The engine decides later whether its steps compute one block of each request.
        single_block_from = (0, 1) if settings.computes_next_block(canvas) else (0,)
        points = product((1, *settings.grid_requests(canvas)), single_block_from)
        grid |= {settings.positions_of_step(canvas, *point) for point in points}
    wanted = floor.Wanted(tuple(sorted(grid)))
    return in_own_process(floor.measure, sizes, wanted, *_device(settings))


def _measure_published(
    settings: Settings, model: Model, prompts: Prompts
) -> list[dict[str, Any]]:
    device = _device(settings)
    if model.is_bundled:
        return in_own_process(
            published_loops.measure_bundled,
            settings.rounds,
            settings.output_len,
            *device,
        )
    rates = sorted({1.0, settings.tokens_per_forward or 1.0})
    ask = prompts.take(settings.input_len)
    return in_own_process(
        published_loops.measure, model.config, ask, settings.output_len, rates, *device
    )


def _check(settings: Settings, model: Model) -> None:
    """Raise ValueError for what this model or machine cannot give, before an engine starts."""
    length, context = _length(settings, model), Sizes.of(model.config).context
    if length > context:
        raise ValueError(
            f"this needs a context of {length} tokens, but the model has {context}: lower "
            "--context, --input-len, --output-len or --canvas."
        )
    if "ar" in settings.versus:
        autoregressive_config(model.config)
    if "hf" in settings.versus:
        published_loops.check(model.config)
    engines.check_compilation(settings)
    if settings.profile and engines.on_cpu():
        raise ValueError("--profile reads a GPU's kernels: there is no GPU here.")


def _length(settings: Settings, model: Model) -> int:
    lengths = [warm_up_context(canvas) for canvas in settings.canvas]
    lengths += [step.context_needed(settings)] if settings.measures_steps else []
    lengths += (
        [throughput_latency.context_needed(settings, model)]
        if settings.request_modes
        else []
    )
    return max(lengths)


def _device(settings: Settings) -> tuple[str, Any]:
    import torch

    name = "cpu" if engines.on_cpu() else "cuda"
    return name, getattr(torch, settings.dtype)


def _of_both(settings: Settings, compiled: bool) -> str:
    how = "compiled" if compiled else "not compiled"
    return f"it and our engine: {settings.dtype}, {how}"
