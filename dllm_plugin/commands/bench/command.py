"""One measurement from the gate to the JSON line."""

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from dllm_plugin.commands.bench import engines, floor, gate, published, record, serving, step
from dllm_plugin.commands.bench.drive import Answer
from dllm_plugin.commands.bench.engines import Model, Prompts
from dllm_plugin.commands.bench.options import Settings
from dllm_plugin.commands.bench.shapes import Sizes, relative

Result = TypeVar("Result")


def run(settings: Settings, command: Sequence[str], reference: Path | None = None) -> int:
    """Gate, floor, engines, baselines; 1 if the gate is red. `reference` as in :mod:`gate`."""
    engines.prepare()
    progress = record.Progress()
    line: dict[str, Any] = record.surroundings(settings, command) | {"gate": "green"}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        scratch = Path(folder)
        model = engines.find_model(settings, scratch)
        _check(settings, model)
        verdicts = []
        for canvas in settings.canvas:
            verdicts.append(gate.check(settings, canvas, reference))
            progress.done(f"gate, canvas {canvas}", verdicts[-1].sentence)
            if not verdicts[-1].green:
                line |= {"gate": "red", "problem": verdicts[-1].sentence}
                line |= {"gates": [v.record for v in verdicts], "seconds": progress.seconds}
                print(json.dumps(line))
                return 1
        line["gates"] = [verdict.record for verdict in verdicts]
        line |= _measure(settings, model, scratch, progress)
    print(json.dumps(line | {"seconds": progress.seconds}))
    return 0


def apart(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call in a process of its own, which gives the GPU's memory back; on a CPU right here.

    This process never touches the GPU: engines that it starts could then not be forked from it.
    """
    if engines.on_cpu():
        return function(*arguments)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _measure(
    settings: Settings, model: Model, scratch: Path, progress: record.Progress
) -> dict[str, Any]:
    """Floor, our engines, baselines, one after the other; prints the tables."""
    sizes = Sizes.of(model.config).share(settings.tensor_parallel_size)
    length = _length(settings, model)
    device = _device(settings)
    prompts = Prompts(model.config, settings.seed)
    grid = set()
    for canvas in settings.canvas:
        # Whether one block each is fed, the engine decides later.
        ways = (0, 1) if settings.feeds_ahead(canvas) else (0,)
        points = product((1, *settings.at_once(canvas)), ways)
        grid |= {settings.fed(canvas, requests, alone) for requests, alone in points}
    limit = apart(floor.measure, sizes, sorted(grid), *device)
    progress.done("floor")
    result: dict[str, Any] = {"floor": limit.record(), "engines": []}
    steps: list[dict[str, Any]] = []
    served: list[tuple[dict[str, Any], list[Answer]]] = []
    traces: list[dict[str, Any]] = []
    for canvas in settings.canvas:
        llm = engines.ours(settings, model, canvas, length, scratch if settings.profile else None)
        result["engines"].append(engines.describe(llm))
        progress.done(f"engine start, canvas {canvas}")
        if settings.steps:
            rows = step.measure(llm, settings, canvas, prompts)
            steps += [step.compare(row, limit, sizes) for row in rows]
            progress.done(f"steps, canvas {canvas}", record.table_of("step", steps))
            if settings.profile:
                traces += step.profile(llm, settings, canvas, prompts, rows, scratch)
                progress.done(f"profile, canvas {canvas}", record.table_of("profile", traces))
        if settings.served:
            served += serving.measure(llm, settings, model, canvas, prompts)
            found = record.table_of("served", [row for row, _ in served])
            progress.done(f"requests, canvas {canvas}", found)
        engines.stop(llm)
    ar_steps, ar_served = None, None
    if "ar" in settings.versus:
        llm = engines.autoregressive(settings, model, length, scratch)
        result["ar"] = {"engine": engines.describe(llm)}
        if settings.steps:
            ar_steps = result["ar"]["step"] = step.measure_autoregressive(llm, settings, prompts)
        ar_served = result["ar"]["served"] = serving.measure_autoregressive(llm, served)
        engines.stop(llm)
        progress.done("plain vLLM")
    authors = None
    if "hf" in settings.versus:
        authors = result["hf"] = _published(settings, model, prompts, device)
        progress.done("the model's own loop")
    result["step"] = [step.beside(row, ar_steps) for row in steps]
    result["served"] = [
        serving.compare(row, limit, sizes, ar_served[i] if ar_served else None, authors)
        for i, (row, _) in enumerate(served)
    ]
    result["profile"] = traces
    for name in record.COLUMNS:
        if result.get(name):
            print(f"{name}:\n{record.table_of(name, result[name])}", flush=True)
    return {name: part for name, part in result.items() if part}


def _published(
    settings: Settings, model: Model, prompts: Prompts, device: tuple[str, Any]
) -> list[dict[str, Any]]:
    if model.is_bundled:
        return apart(published.measure_bundled, settings.rounds, settings.output_len, *device)
    rates = sorted({1.0, settings.tokens_per_forward or 1.0})
    ask = prompts.take(settings.input_len)
    return apart(published.measure, model.config, ask, settings.output_len, rates, *device)


def _check(settings: Settings, model: Model) -> None:
    """Raise ValueError for what this model or machine cannot give, before an engine starts."""
    length, context = _length(settings, model), Sizes.of(model.config).context
    if length > context:
        raise ValueError(
            f"this needs a context of {length} tokens, but the model has {context}: lower "
            "--context, --input-len, --output-len or --canvas."
        )
    if "ar" in settings.versus:
        relative(model.config)
    if "hf" in settings.versus:
        published.check(model.config)
    engines.check_compilation(settings)
    if settings.profile and engines.on_cpu():
        raise ValueError("--profile reads a GPU's kernels: there is no GPU here.")


def _length(settings: Settings, model: Model) -> int:
    lengths = [2 * canvas + 8 for canvas in settings.canvas]
    lengths += [step.longest(settings)] if settings.steps else []
    lengths += [serving.longest(settings, model)] if settings.served else []
    return max(lengths)


def _device(settings: Settings) -> tuple[str, Any]:
    import torch

    name = "cpu" if engines.on_cpu() else "cuda"
    return name, torch.float32 if settings.dtype == "float32" else torch.bfloat16
