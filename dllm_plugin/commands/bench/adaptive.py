"""Run ``diffuplug bench adaptive``: tokens per second of each width, and of widths by load.

One engine with floating canvases serves all of it: a fixed width is a schedule of requests. Dummy
weights accept masks by drawn numbers (``--acceptance``), checkpoints by what they are certain of.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_plugin.commands.bench import engines, report
from dllm_plugin.commands.bench.adaptive_options import LIKE, MODE
from dllm_plugin.commands.bench.engines import Model, Prompts
from dllm_plugin.commands.bench.options import Settings, settings_of
from dllm_plugin.commands.bench.request_loop import Ask, Run, serve
from dllm_plugin.commands.bench.throughput_latency import (
    context_needed,
    problem_prompts,
    problems_of,
)
from dllm_plugin.commands.forecast import EXAMPLE, read_acceptance
from dllm_plugin.commands.offline import stop_engine

if TYPE_CHECKING:
    from vllm import LLM

BY_LOAD, BLOCKS = "by load", "blocks"


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure every width at every number of requests; print a table and one JSON line."""
    # Without floating canvases nothing has a width: the usual blocks are measured.
    widths = [] if args.adaptive == "off" else _widths(args.widths)
    is_dummy, args.mode = args.shapes is not None, LIKE
    if args.acceptance is not None and not is_dummy:
        raise ValueError("--acceptance needs --shapes: a checkpoint accepts by its confidence")
    accepted = read_acceptance(args.acceptance or EXAMPLE) if is_dummy else None
    if args.tokens_per_forward is not None:
        raise ValueError("--tokens-per-forward follows from --acceptance here: leave it out")
    args.tokens_per_forward = 1.0 if is_dummy else None
    settings = settings_of(args)
    if "hf" in settings.versus or settings.versus and not is_dummy:
        raise ValueError("--vs ar is the one baseline here, and it needs --shapes: leave --vs out")
    canvas = settings.canvas[0]
    if len(settings.canvas) > 1 or max(widths, default=1) > canvas:
        raise ValueError(
            f"--canvas must be one length of at least {max(widths, default=1)} positions"
        )
    engines.prepare()
    line: dict[str, Any] = report.surroundings(settings, command) | {"benchmark": MODE}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        model = engines.find_model(settings, Path(folder))
        length = context_needed(settings, model)
        settings = engines.with_dtype(settings, model, length)
        options = engines.options_of_ours(settings, model, canvas, length)
        options["additional_config"] = {"dllm": _dllm(settings, canvas, args)}
        llm = engines.start(settings, options)
        if accepted is not None:
            llm.collective_rpc("accept", args=(*accepted, settings.seed))
        asks = _Asks(settings, model, llm)
        found = [
            (n, width, _serve(llm, settings, asks, n, width))
            for n in settings.grid_requests(canvas)
            for width in (*widths, None)
        ]
        line |= {"engine": engines.describe(llm), "acceptance": accepted}
        stop_engine(llm)
        plain = _plain(settings, model, length, Path(folder)) if "ar" in settings.versus else {}
    rest = BY_LOAD if widths else BLOCKS
    rows = [_row(n, width or rest, run, plain.get(n)) for n, width, run in found]
    print(_table(rows))
    print(json.dumps(line | {"rows": rows}))
    return 0


def _widths(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise ValueError(f"--widths must be whole numbers of at least 1, as in 2,8, got {text!r}")
    return sorted({int(word) for word in words})


def _dllm(settings: Settings, canvas: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the decode options of the engine; by default a window may be a whole canvas."""
    usual = settings.block(canvas) if args.adaptive == "off" else canvas
    options = {
        "strategy": settings.strategy,
        "adaptive": args.adaptive,
        "min_window": args.min_window,
        "canvas_length": canvas,
        "block_length": settings.block_length or usual,
        "threshold": settings.threshold,
        "lora_path": settings.lora_path,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return given | settings.switches | settings.refreshes


class _Asks:
    """Make requests: word problems for a checkpoint, random prompts for dummy weights."""

    def __init__(self, settings: Settings, model: Model, llm: "LLM") -> None:
        self.settings, self.is_real = settings, model.is_real
        self.prompts, self.llm = Prompts(model.config, settings.seed), llm

    def take(self, count: int, width: int | None) -> list[Ask]:
        """Return so many requests of a fixed width, or of widths by load."""
        sampling: dict[str, Any] = {"max_tokens": self.settings.output_len}
        if width is not None:
            sampling["extra_args"] = {"dllm_schedule": [width]}
        if not self.is_real:
            length = self.settings.input_len
            return [self.prompts.ask(length, **sampling) for _ in range(count)]
        found = problem_prompts(self.llm.get_tokenizer(), problems_of(count))
        return [Ask(prompt, sampling) for prompt in found]


def _serve(llm: "LLM", settings: Settings, asks: _Asks, at_once: int, width: int | None) -> Run:
    """Serve requests of one width; once before that is measured, which teaches the controller."""
    serve(llm, asks.take(at_once, width), at_once)
    return serve(llm, asks.take(at_once * settings.rounds, width), at_once)


def _plain(settings: Settings, model: Model, length: int, scratch: Path) -> dict[int, float]:
    """Return the tokens per second of plain vLLM, by requests at once."""
    llm = engines.start_autoregressive(settings, model, length, scratch, not engines.on_cpu())
    asks, rates = _Asks(settings, model, llm), {}
    for n in settings.requests:
        done = _serve(llm, settings, asks, n, None)
        rates[n] = _tokens(done) / done.seconds
    stop_engine(llm)
    return rates


def _tokens(run: Run) -> int:
    return sum(len(answer.token_ids) for answer in run.answers)


def _row(n: int, width: int | str, run: Run, plain: float | None) -> dict[str, Any]:
    """Return what is said of a run."""
    tokens, forwards = _tokens(run), sum(answer.forwards for answer in run.answers)
    positions = sum(answer.canvas_positions for answer in run.answers)
    row = {
        "requests": n,
        "width": width,
        "tokens_per_s": tokens / run.seconds,
        "tokens_per_forward": tokens / forwards,
        "mean_width": positions / forwards,
    }
    return row if plain is None else row | {"speedup_vs_ar": tokens / run.seconds / plain}


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [f"{'requests':>8} {'width':>8} {'tokens/s':>10} {'/forward':>9} {'by AR':>6}"]
    for row in rows:
        plain = f"{row['speedup_vs_ar']:.2f}" if "speedup_vs_ar" in row else "-"
        lines.append(
            f"{row['requests']:>8} {row['width']:>8} {row['tokens_per_s']:>10.1f} "
            f"{row['tokens_per_forward']:>9.2f} {plain:>6}"
        )
    return "\n".join(lines)
