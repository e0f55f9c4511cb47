"""Run ``diffuplug bench map``: for which loads diffusion decodes faster than left to right.

One engine times steps of each width, number of requests and context; the LM head is part of them.
A step of one position for each request is what plain vLLM computes for one token of each. With a
given acceptance each load then has a ratio of tokens per second, for a fixed width and for the
best one. Prompts, proposing and deciding are left out.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from diffuplug_bench import engines, report
from diffuplug_bench.eval.report import check_matplotlib
from diffuplug_bench.model_shapes import Sizes
from diffuplug_bench.options import one_canvas, settings_of, whole_numbers
from diffuplug_bench.settings import MAP, Settings
from dllm_plugin.commands.forecast import EXAMPLE, read_acceptance
from dllm_plugin.commands.offline import stop_engine
from dllm_plugin.config.cuda_graphs import warm_up_context
from dllm_plugin.decoding.acceptance import tokens_per_forward
from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.decoding.step_costs import READS, WeightBytes, costs_of


class Step(NamedTuple):
    """Describe a timed step; `context` is that of each request."""

    requests: int
    width: int
    context: int
    ms: float


class Point(NamedTuple):
    """Compare a load with plain decoding: ratios of tokens per second, and the best width.

    fits  whether the KV cache has room for the contexts
    """

    requests: int
    context: int
    fixed: float
    adaptive: float
    width: int
    fits: bool


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Time the steps; print them beside the model's, the ratios and a JSON line; draw the map."""
    if args.picture is not None:
        check_matplotlib("bench map --picture draws")
    accepted = read_acceptance(args.acceptance or EXAMPLE)
    if args.shapes is None:
        raise ValueError("bench map needs --shapes: it times only dummy weights")
    settings = settings_of(args, mode="step")
    contexts = whole_numbers(
        args.contexts, "--contexts must be whole numbers of tokens, as in 512,8192"
    )
    canvas = one_canvas(settings.canvas)
    refusal = f"--widths must be whole numbers from 1 to {canvas}"
    widths = sorted({1, canvas, *whole_numbers(args.widths, refusal, canvas)})
    engines.prepare()
    progress = report.Progress()
    line = report.surroundings(settings, command) | {"benchmark": MAP}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        model = engines.find_model(settings, Path(folder))
        sizes = Sizes.of(model.config)
        longest = max(contexts)
        length = longest + warm_up_context(canvas)
        if length > sizes.context:
            raise ValueError(
                f"--contexts {longest} needs a context of {length} tokens, but the model has "
                f"{sizes.context}: lower it."
            )
        options = engines.options_of_ours(settings, model, canvas, length)
        llm = engines.start(settings, _options(settings, options, canvas))
        progress.done("engine start")
        steps, model_ms = _time_steps(llm, settings, widths, contexts, sizes, progress)
        line["engine"] = engines.describe(llm)
        family = FAMILIES[llm.llm_engine.vllm_config.model_config.architecture]
        stop_engine(llm)
    room = line["engine"]["kv_cache_tokens"]
    points = ratios(steps, accepted, family.logits_shift, canvas, room)
    print("tokens per second by plain decoding:")
    print(report.table_of("map", [_row(point) for point in points]))
    if args.picture is not None:
        title = f"{args.shapes}, acceptance {accepted[0]:g}:{accepted[1]:g}"
        draw(points, args.picture, title)
    line |= {"acceptance": accepted, "fixed_width": canvas}
    line |= {"steps": [step._asdict() for step in steps], "model_ms": model_ms}
    line |= {"map": [point._asdict() for point in points], "seconds": progress.seconds}
    print(json.dumps(line))
    return 0


def _row(point: Point) -> dict[str, Any]:
    return point._asdict() | {"fits": "yes" if point.fits else "no"}


def _time_steps(
    llm: Any,
    settings: Settings,
    widths: list[int],
    contexts: list[int],
    sizes: Sizes,
    progress: report.Progress,
) -> tuple[list[Step], list[float]]:
    """Return all steps, and what the controller's model computes for each, in ms."""
    steps: list[Step] = []
    model_ms: list[float] = []
    for n in settings.requests:
        known = len(steps)
        timed = llm.collective_rpc("time_steps", args=([n], widths, contexts))[0]
        steps += [Step(*row) for row in timed]
        model_ms = modelled(steps, sizes, 2)
        rows = []
        for step, ms in zip(steps[known:], model_ms[known:], strict=True):
            rows.append(step._asdict() | {"model_ms": ms, "ratio": step.ms / ms})
        progress.done(f"steps of {n} requests", report.table_of("map_steps", rows))
    return steps, model_ms


def _options(
    settings: Settings, options: dict[str, Any], canvas: int
) -> dict[str, Any]:
    """Return the engine's options; on a GPU with room for graphs of the largest step.

    It serves nothing, so the graphs of its own are few: those of one narrow width.
    """
    dllm: dict[str, Any] = {
        "adaptive": "throughput",
        "min_window": 2,
        "max_window": 2,
        "block_length": canvas,
        "strategy": settings.strategy,
        "canvas_length": canvas,
    }
    options["additional_config"] = {"dllm": dllm | settings.switches}
    most = max(settings.requests) * canvas
    options["max_num_batched_tokens"] = max(most + options["max_model_len"], 2048)
    if not engines.on_cpu() and settings.compilation_config is None:
        options["compilation_config"] = {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, most],
        }
    return options


def modelled(steps: Sequence[Step], sizes: Sizes, item: int) -> list[float]:
    """Return the controller's model of each step, in ms, from the smallest step's time."""
    base = min(step.ms for step in steps)
    weights = weight_bytes(sizes, item)
    costs = costs_of(weights, sizes.kv_bytes(1, item), READS, base)
    return [costs.step(s.requests, s.width, s.requests * s.context) for s in steps]


def weight_bytes(sizes: Sizes, item: int) -> WeightBytes:
    """Return what steps read of weights with these sizes, of `item` bytes each."""

    def of(gemms: Sequence[tuple[int, int]]) -> int:
        return item * sum(outputs * inputs for outputs, inputs in gemms)

    mixtures = sizes.layers - sizes.dense_layers if sizes.experts else 0
    one = mixtures * of(sizes.mlp_gemms(sizes.expert_inner))
    dense = 2 * of([(sizes.vocab, sizes.width)])  # embedding and LM head
    dense += sizes.layers * of(sizes.attention_gemms)
    dense += (sizes.layers - mixtures) * of(sizes.mlp_gemms(sizes.inner))
    small = dense + (sizes.shared_experts + sizes.experts_per_token) * one
    return WeightBytes(small, one, sizes.experts, sizes.experts_per_token)


def ratios(
    steps: Sequence[Step],
    accepted: tuple[float, float],
    shift: bool,
    fixed: int,
    room: int,
) -> list[Point]:
    """Return each load's tokens per second, by those of one position of each request."""
    ms_by_load: dict[tuple[int, int], dict[int, float]] = {}
    for step in steps:
        load = step.requests, step.context
        ms_by_load.setdefault(load, {})[step.width] = step.ms
    points = []
    for (requests, context), ms in sorted(ms_by_load.items()):
        rates: dict[int, float] = {}
        for width in sorted(ms):
            # One position decodes a masked model at half a token a forward, so nobody does.
            if width > 1 or shift:
                tokens = tokens_per_forward(width, *accepted, shift)
                rates[width] = tokens * ms[1] / ms[width]
        best = max(rates, key=lambda width: rates[width])
        fixed_rate = rates.get(fixed, float("nan"))
        fits = requests * context <= room
        points.append(Point(requests, context, fixed_rate, rates[best], best, fits))
    return points


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw both ratios over requests and contexts, a cell each; hatched: the KV cache is full."""
    rectangle = import_module("matplotlib.patches").Rectangle
    colour_of = import_module("matplotlib").colormaps["RdYlGn"]
    scale = import_module("matplotlib.colors").TwoSlopeNorm(1.0, 0.4, 2.6)
    figure = import_module("matplotlib.figure").Figure(figsize=(11, 4.5), dpi=110)
    requests = sorted({point.requests for point in points})
    contexts = sorted({point.context for point in points})
    for panel, name in zip(figure.subplots(1, 2), ("fixed", "adaptive"), strict=True):
        for point in points:
            ratio = getattr(point, name)
            x, y = requests.index(point.requests), contexts.index(point.context)
            cell = rectangle((x - 0.5, y - 0.5), 1, 1, edgecolor="white")
            cell.set_facecolor(colour_of(float(scale(ratio))))
            if not point.fits:
                cell.set_hatch("///")
            panel.add_patch(cell)
            text = f"{ratio:.2f}"
            if name == "adaptive":
                text += f"\nwidth {point.width}"
            panel.text(x, y, text, ha="center", va="center", fontsize=8)
        panel.set(xlim=(-0.5, len(requests) - 0.5), ylim=(-0.5, len(contexts) - 0.5))
        panel.set_xticks(range(len(requests)), requests)
        panel.set_yticks(range(len(contexts)), contexts)
        panel.set(xlabel="requests", ylabel="context", title=f"{name} width")
    figure.suptitle(f"Tokens per second by plain decoding: {title}")
    figure.tight_layout()
    figure.savefig(path)
