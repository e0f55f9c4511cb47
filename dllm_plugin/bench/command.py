"""One measurement from the gate to the JSON line."""

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from dllm_plugin.bench import engines, floor, gate, record, step
from dllm_plugin.bench.engines import Model, Prompts
from dllm_plugin.bench.options import Settings
from dllm_plugin.bench.shapes import Sizes

Result = TypeVar("Result")


def run(settings: Settings, command: Sequence[str], reference: Path | None = None) -> int:
    """Gate, floor, engines, baselines; 1 if the gate is red. `reference` as in :mod:`gate`."""
    engines.prepare()
    line: dict[str, Any] = record.surroundings(settings, command) | {"gate": "green"}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        scratch = Path(folder)
        model = engines.find_model(settings, scratch)
        verdicts = []
        for canvas in settings.canvas:
            verdicts.append(gate.check(settings, canvas, reference))
            print(f"gate: {verdicts[-1].sentence}", flush=True)
            if not verdicts[-1].green:
                red = {"gate": "red", "problem": verdicts[-1].sentence}
                print(json.dumps(line | red | {"gates": [v.record for v in verdicts]}))
                return 1
        line["gates"] = [verdict.record for verdict in verdicts]
        line |= _measure(settings, model, scratch)
    print(json.dumps(line))
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


def _measure(settings: Settings, model: Model, scratch: Path) -> dict[str, Any]:
    sizes, length = Sizes.of(model.config), _length(settings)
    if length > sizes.context:
        raise ValueError(
            f"this needs a context of {length} tokens, but the model has {sizes.context}: lower "
            "--context, --input-len, --output-len or --canvas."
        )
    result: dict[str, Any] = {"engines": []}
    prompts = Prompts(model.config, settings.seed)
    grid = [n * canvas for n in settings.requests for canvas in settings.canvas]
    limit = apart(floor.measure, sizes, [*grid, *settings.requests], *_device(settings))
    steps = []
    for canvas in settings.canvas:
        llm = engines.ours(settings, model, canvas, length)
        result["engines"].append(engines.describe(llm))
        if settings.steps:
            steps += step.measure(llm, settings, canvas, prompts)
        engines.stop(llm)
    ar_steps = None
    if "ar" in settings.versus:
        llm = engines.autoregressive(settings, model, length, scratch)
        result["ar"] = {"engine": engines.describe(llm)}
        if settings.steps:
            ar_steps = step.measure_autoregressive(llm, settings, prompts)
            result["ar"]["step"] = ar_steps
        engines.stop(llm)
    result["floor"] = limit.record()
    if settings.steps:
        result["step"] = [step.compare(row, limit, sizes, ar_steps) for row in steps]
        print(record.table(result["step"], record.STEP_COLUMNS), flush=True)
    return result


def _length(settings: Settings) -> int:
    lengths = [step.longest(settings)] if settings.steps else []
    return max([*lengths, *(2 * canvas + 8 for canvas in settings.canvas)])


def _device(settings: Settings) -> tuple[str, Any]:
    import torch

    name = "cpu" if engines.on_cpu() else "cuda"
    return name, torch.float32 if settings.dtype == "float32" else torch.bfloat16
