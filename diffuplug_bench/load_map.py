"""Run ``diffuplug bench map``: for which loads diffusion decodes faster than left to right.

One engine times steps of each width, number of requests and context; the LM head is part of them.
A step of one position for each request is what plain vLLM computes for one token of each. With a
stated acceptance each load then has a ratio of tokens per second, for a fixed width and for the
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
from diffuplug_bench.adaptive_options import MAP
from diffuplug_bench.model_shapes import Sizes
from diffuplug_bench.options import settings_of
from diffuplug_bench.settings import Settings
from dllm_plugin.commands.forecast import EXAMPLE, read_acceptance
from dllm_plugin.commands.offline import stop_engine
from dllm_plugin.config.cuda_graphs import warm_up_context
from dllm_plugin.decoding.acceptance import tokens_per_forward
from dllm_plugin.decoding.step_costs import READS, WeightBytes, costs_of


class Step(NamedTuple):
    """Hold a timed step; `context` is that of each request."""

    requests: int
    width: int
    context: int
    ms: float


class Point(NamedTuple):
    """Hold a load: tokens per second by those of plain decoding, and by which width.

    fits  whether the KV cache holds so much context
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
        check_matplotlib()
    accepted = read_acceptance(args.acceptance or EXAMPLE)
    if args.shapes is None:
        raise ValueError("bench map needs --shapes: it times dummy weights alone")
    args.mode = "step"
    settings, contexts = settings_of(args), _contexts(args.contexts)
    if len(settings.canvas) > 1:
        raise ValueError(
            f"--canvas must be one length, got {','.join(map(str, settings.canvas))}"
        )
    canvas = settings.canvas[0]
    widths = sorted({1, *_widths(args.widths, canvas)})
    engines.prepare()
    progress = report.Progress()
    line: dict[str, Any] = report.surroundings(settings, command) | {"benchmark": MAP}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        model = engines.find_model(settings, Path(folder))
        sizes, most = Sizes.of(model.config), max(contexts) + warm_up_context(canvas)
        if most > sizes.context:
            raise ValueError(
                f"--contexts {max(contexts)} needs a context of {most} tokens, but the model has "
                f"{sizes.context}: lower it."
            )
        options = _options(
            settings, engines.options_of_ours(settings, model, canvas, most), canvas
        )
        llm = engines.start(settings, options)
        progress.done("engine start")
        steps: list[Step] = []
        for n in settings.requests:
            timed = llm.collective_rpc("time_steps", args=([n], widths, contexts))[0]
            steps += [Step(*row) for row in timed]
            model_ms = modelled(steps, sizes, 2)
            new = slice(len(steps) - len(timed), None)
            progress.done(
                f"steps of {n} requests", _steps_table(steps[new], model_ms[new])
            )
        line["engine"] = engines.describe(llm)
        shift = bool(_shifted(llm))
        stop_engine(llm)
    points = ratios(steps, accepted, shift, canvas, line["engine"]["kv_cache_tokens"])
    print(_points_table(points))
    if args.picture is not None:
        draw(
            points,
            args.picture,
            f"{args.shapes}, acceptance {accepted[0]:g}:{accepted[1]:g}",
        )
    line |= {"acceptance": accepted, "fixed_width": canvas}
    line |= {"steps": [step._asdict() for step in steps], "model_ms": model_ms}
    line |= {"map": [point._asdict() for point in points], "seconds": progress.seconds}
    print(json.dumps(line))
    return 0


def _options(
    settings: Settings, options: dict[str, Any], canvas: int
) -> dict[str, Any]:
    """Return the engine's options; on a GPU with room for graphs of the largest step.

    It serves nothing, so the graphs of its own are few: those of one narrow width.
    """
    narrow = {
        "adaptive": "throughput",
        "min_window": 2,
        "max_window": 2,
        "block_length": canvas,
    }
    switches = settings.switches | {
        "strategy": settings.strategy,
        "canvas_length": canvas,
    }
    options["additional_config"] = {"dllm": narrow | switches}
    most = max(settings.requests) * canvas
    options["max_num_batched_tokens"] = max(most + options["max_model_len"], 2048)
    if not engines.on_cpu() and settings.compilation_config is None:
        graphs = {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, most],
        }
        options["compilation_config"] = graphs
    return options


def _shifted(llm: Any) -> bool:
    from dllm_plugin.decoding.families import FAMILIES

    shift: bool = FAMILIES[
        llm.llm_engine.vllm_config.model_config.architecture
    ].logits_shift
    return shift


def _widths(text: str, canvas: int) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= canvas for word in words):
        raise ValueError(
            f"--widths must be whole numbers from 1 to {canvas}, got {text!r}"
        )
    return sorted({int(word) for word in words} | {canvas})


def _contexts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise ValueError(
            f"--contexts must be whole numbers of tokens, as in 512,8192, got {text!r}"
        )
    return sorted({int(word) for word in words})


def modelled(steps: Sequence[Step], sizes: Sizes, item: int) -> list[float]:
    """Return what the controller's model says of each step, in ms, from the smallest step's."""
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
    dense = (
        sizes.layers * of(sizes.attention_gemms) + 2 * item * sizes.vocab * sizes.width
    )
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
    ms = {(s.requests, s.context, s.width): s.ms for s in steps}
    points = []
    for requests, context in sorted({(s.requests, s.context) for s in steps}):
        plain, rates = ms[requests, context, 1], {}
        for width in sorted({s.width for s in steps}):
            # One position decodes a masked model at half a token a forward, so nobody does.
            if (requests, context, width) in ms and (width > 1 or shift):
                tokens = tokens_per_forward(width, *accepted, shift)
                rates[width] = tokens * plain / ms[requests, context, width]
        best = max(rates, key=lambda width: rates[width])
        fits = requests * context <= room
        load = (requests, context, rates.get(fixed, float("nan")), rates[best])
        points.append(Point(*load, best, fits))
    return points


def check_matplotlib() -> None:
    """Raise ValueError if matplotlib is missing, before minutes are spent measuring."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(
            "bench map --picture draws with matplotlib, which is not installed: pip install "
            "'.[plot]' in a clone of DiffuPlug, or pip install matplotlib"
        ) from error


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw both ratios over requests and contexts, a cell each; hatched: the KV cache is full."""
    figure = import_module("matplotlib.figure").Figure(figsize=(11, 4.5), dpi=110)
    colours = import_module("matplotlib.colors").TwoSlopeNorm(1.0, 0.4, 2.6)
    panels = figure.subplots(1, 2)
    requests = sorted({point.requests for point in points})
    contexts = sorted({point.context for point in points})
    for panel, name in zip(panels, ("fixed", "adaptive"), strict=True):
        for point in points:
            place = requests.index(point.requests), contexts.index(point.context)
            ratio, hatch = getattr(point, name), None if point.fits else "///"
            colour = import_module("matplotlib").colormaps["RdYlGn"](
                float(colours(ratio))
            )
            x, y = place[0] - 0.5, place[1] - 0.5
            shape = import_module("matplotlib.patches").Rectangle(
                (x, y), 1, 1, facecolor=colour, edgecolor="white", hatch=hatch
            )
            panel.add_patch(shape)
            text = f"{ratio:.2f}" + (
                f"\nwidth {point.width}" if name == "adaptive" else ""
            )
            panel.text(*place, text, ha="center", va="center", fontsize=8)
        panel.set(xlim=(-0.5, len(requests) - 0.5), ylim=(-0.5, len(contexts) - 0.5))
        panel.set_xticks(range(len(requests)), requests)
        panel.set_yticks(range(len(contexts)), contexts)
        panel.set(xlabel="requests", ylabel="context", title=f"{name} width")
    figure.suptitle(f"Tokens per second by plain decoding: {title}")
    figure.tight_layout()
    figure.savefig(path)


def _steps_table(steps: Sequence[Step], model_ms: Sequence[float]) -> str:
    """Return the timed steps as text, beside the model's."""
    lines = [
        f"{'requests':>8} {'width':>6} {'context':>8} {'ms':>9} {'model ms':>9} {'ratio':>6}"
    ]
    for step, ms in zip(steps, model_ms, strict=True):
        lines.append(
            f"{step.requests:>8} {step.width:>6} {step.context:>8} {step.ms:>9.3f} {ms:>9.3f} "
            f"{step.ms / ms:>6.2f}"
        )
    return "\n".join(lines)


def _points_table(points: Sequence[Point]) -> str:
    """Return the map as text."""
    lines = [
        f"{'requests':>8} {'context':>8} {'fixed':>7} {'adaptive':>9} {'width':>6}  by plain"
    ]
    for point in points:
        full = "" if point.fits else "  (the KV cache holds less)"
        lines.append(
            f"{point.requests:>8} {point.context:>8} {point.fixed:>7.2f} {point.adaptive:>9.2f} "
            f"{point.width:>6}{full}"
        )
    return "\n".join(lines)
