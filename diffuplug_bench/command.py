"""Run ``diffuplug bench step | throughput | latency | all``, from the gate to the JSON line."""

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from diffuplug_bench import engines, gate, published_loops, report
from diffuplug_bench.engines import Model, Prompts
from diffuplug_bench.model_shapes import Sizes, autoregressive_config, schedule_of
from diffuplug_bench.request_loop import Answer
from diffuplug_bench.serving import requests
from diffuplug_bench.settings import Settings
from diffuplug_bench.step import engine_gemms, floor, measure, profile
from dllm_plugin.commands.offline import stop_engine
from dllm_plugin.config.cuda_graphs import warm_up_context
from dllm_plugin.models.checkpoints.sizes import kv_item_bytes

if TYPE_CHECKING:
    from vllm import LLM

Result = TypeVar("Result")
# Of a step whose floor is timed; larger steps take time in proportion.
MOST_POSITIONS = 16384


def run(
    settings: Settings, command: Sequence[str], reference: Path | None = None
) -> int:
    """Run gate, floor, engines and baselines; return 1 if the gate is red.

    Args:
        reference: as in :func:`gate.check`.
    """
    engines.prepare()
    progress = report.Progress()
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        scratch = Path(folder)
        model = engines.find_model(settings, scratch)
        schedule = schedule_of(model.config, settings.strategy)
        settings = replace(settings, schedule=schedule)
        line = report.surroundings(settings, command) | {"gate": "green"}
        _check(settings, model)
        settings = engines.with_dtype(settings, model, _length(settings, model))
        gates: list[dict[str, Any]] = []
        line["gates"] = gates
        checks = {}
        for canvas in settings.canvas:
            checks[f"canvas {canvas}"] = partial(
                gate.check, settings, canvas, reference
            )
        if engines.precision(settings) or settings.head_quantization:
            checks["quantised"] = partial(gate.check_quantised, settings)
        for name, check in checks.items():
            verdict = check()
            progress.done(f"gate, {name}", verdict.sentence)
            gates.append(verdict.record)
            if not verdict.green:
                line |= {"gate": "red", "problem": verdict.sentence}
                print(json.dumps(line | {"seconds": progress.seconds}))
                return 1
        line |= Measurement(settings, model, scratch, progress).run()
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


class Measurement:
    """Measure floor, our engines and baselines, one after the other; collect their rows."""

    def __init__(
        self, settings: Settings, model: Model, scratch: Path, progress: report.Progress
    ) -> None:
        self.settings, self.model = settings, model
        self.scratch, self.progress = scratch, progress
        self.sizes = Sizes.of(model.config).per_rank(settings.tensor_parallel_size)
        self.length = _length(settings, model)
        self.prompts = Prompts(model.config, settings.seed)
        self.engines: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.served: list[tuple[dict[str, Any], list[Answer]]] = []
        self.traces: list[dict[str, Any]] = []
        self.limit: floor.Floor | None = None
        self.copy_rate = 0.0  # measured if the floor is that of an engine
        quantised = model.config.get("quantization_config")
        self.quantised = bool(
            quantised or settings.quantization or settings.head_quantization
        )

    def run(self) -> dict[str, Any]:
        """Return the entries of the JSON line; print the tables."""
        if self.quantised:
            device, _ = _device(self.settings)
            self.copy_rate = in_own_process(floor.copy_rate, device)
        else:
            self._measure_floor()
        for canvas in self.settings.canvas:
            self._measure_ours(canvas)
        limit = self._limit
        result: dict[str, Any] = {"floor": limit.record(), "engines": self.engines}
        ar_steps: dict[int, dict[str, Any]] | None = None
        ar_served: list[dict[str, Any]] | None = None
        if "ar" in self.settings.versus:
            result["ar"] = self._measure_plain()
            ar_steps, ar_served = result["ar"].get("step"), result["ar"]["served"]
        published = None
        if "hf" in self.settings.versus:
            published = _measure_published(self.settings, self.model, self.prompts)
            result["hf"] = published
            self.progress.done("the model's own loop")
        result["step"] = [measure.add_baseline(row, ar_steps) for row in self.steps]
        result["served"] = []
        for i, (row, _) in enumerate(self.served):
            ar = ar_served[i] if ar_served else None
            row = requests.add_baselines(row, limit, self.sizes, ar, published)
            result["served"].append(row)
        result["profile"] = self.traces
        for name in report.COLUMNS:
            if result.get(name):
                print(f"{name}:\n{report.table_of(name, result[name])}", flush=True)
        return {name: found for name, found in result.items() if found}

    @property
    def _limit(self) -> floor.Floor:
        assert self.limit is not None
        return self.limit

    def _measure_floor(self, llm: "LLM | None" = None) -> None:
        """Measure the floor once: by GEMMs in the model's dtype, or by those of an engine."""
        settings, (device, dtype) = self.settings, _device(self.settings)
        wanted = _wanted(settings, self.model)
        kv_item = kv_item_bytes(settings.kv_cache_dtype or "auto", dtype.itemsize)
        if llm is None:
            given = (self.sizes, wanted, device, dtype, kv_item)
            self.limit = in_own_process(floor.measure, *given)
        else:
            self.limit = engine_gemms.measure(llm, wanted, self.copy_rate, kv_item)
        self.progress.done("floor")

    def _measure_ours(self, canvas: int) -> None:
        settings, prompts = self.settings, self.prompts
        traces = self.scratch if settings.profile else None
        llm = engines.start_ours(settings, self.model, canvas, self.length, traces)
        self.engines.append(engines.describe(llm))
        self.progress.done(f"engine start, canvas {canvas}")
        if self.limit is None:
            self._measure_floor(llm)
        if settings.measures_steps:
            tell = partial(report.tell, "step")
            rows = measure.measure(llm, settings, canvas, prompts, tell)
            for row in rows:
                self.steps.append(measure.add_floor(row, self._limit, self.sizes))
            table = report.table_of("step", self.steps)
            self.progress.done(f"steps, canvas {canvas}", table)
            if settings.profile:
                self.traces += profile.measure(
                    llm, settings, canvas, prompts, rows, self.scratch
                )
                table = report.table_of("profile", self.traces)
                self.progress.done(f"profile, canvas {canvas}", table)
        if settings.request_modes:
            tell = partial(report.tell, "served")
            self.served += requests.measure(
                llm, settings, self.model, canvas, prompts, tell
            )
            table = report.table_of("served", [row for row, _ in self.served])
            self.progress.done(f"requests, canvas {canvas}", table)
        stop_engine(llm)

    def _measure_plain(self) -> dict[str, Any]:
        """Return the rows of plain vLLM, which on a CPU is compiled if our engine is."""
        settings = self.settings
        compiled = self.engines[-1]["compilation_mode"] != "NONE"
        llm = engines.start_autoregressive(
            settings, self.model, self.length, self.scratch, compiled
        )
        self.progress.done("engine start, plain vLLM")
        result: dict[str, Any] = {"engine": engines.describe(llm)}
        if settings.measures_steps:
            result["step"] = measure.measure_autoregressive(llm, settings, self.prompts)
        result["served"] = requests.measure_autoregressive(llm, self.served)
        stop_engine(llm)
        how = "compiled" if compiled else "not compiled"
        of_both = f"it and our engine: {settings.dtype}, {how}"
        self.progress.done("plain vLLM", of_both)
        return result


def _wanted(settings: Settings, model: Model) -> floor.Wanted:
    """Return every number of positions that a step of the grid may compute."""
    positions: set[int] = set()
    most = None
    if settings.measured.full_attention:
        rows = []
        for canvas in settings.canvas:
            rows.append(max(settings.grid_requests(canvas)) * settings.block(canvas))
        longest = max(settings.requests) * _length(settings, model)
        most = min(longest, MOST_POSITIONS), max(rows)
    else:
        for canvas in settings.canvas:
            # The engine decides later whether its steps compute one block of each request.
            single_block_from = (0, 1) if settings.computes_next_block(canvas) else (0,)
            points = product((1, *settings.grid_requests(canvas)), single_block_from)
            positions |= {
                settings.positions_of_step(canvas, *point) for point in points
            }
    return floor.Wanted(tuple(sorted(positions)), most)


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
    if settings.measures_steps:
        lengths.append(measure.context_needed(settings))
    if settings.request_modes:
        lengths.append(requests.context_needed(settings, model))
    return max(lengths)


def _device(settings: Settings) -> tuple[str, Any]:
    import torch

    name = "cpu" if engines.on_cpu() else "cuda"
    return name, getattr(torch, settings.dtype)
