"""Run ``diffuplug bench adaptive``: tokens per second of each width, and of widths by load.

One engine with floating canvases serves all of it: a fixed width is a schedule of requests. Dummy
weights accept masks by drawn numbers (``--acceptance``), checkpoints by what they are certain of.
Each row is printed once it is measured, as JSON.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffuplug_bench import engines, report
from diffuplug_bench.adaptive_options import FIXED, LIKE, MODE
from diffuplug_bench.engines import Model, Prompts
from diffuplug_bench.options import settings_of
from diffuplug_bench.request_loop import Ask, Run, serve
from diffuplug_bench.settings import Settings
from diffuplug_bench.throughput_latency import (
    context_needed,
    problem_prompts,
    problems_of,
)
from dllm_plugin.commands.forecast import EXAMPLE, read_acceptance
from dllm_plugin.commands.offline import stop_engine

if TYPE_CHECKING:
    from vllm import LLM

BY_LOAD, BLOCKS, NO_WIDTHS = "by load", "blocks", "none"
WARMUP_PROMPT, WARMUP_TOKENS = (
    512,
    32,
)  # at most, of requests that only warm an engine up


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure every width at every number of requests; print a table and one JSON line."""
    # Without floating canvases nothing has a width: the usual blocks are measured.
    if args.adaptive == "off" and args.widths is not None:
        raise ValueError(
            f"--widths {args.widths} has no effect with --adaptive off: leave one of them out"
        )
    if args.approximations:
        raise ValueError(
            "--approximations are of full attention, which has no widths: leave it out"
        )
    widths = [] if args.adaptive == "off" else _widths(args.widths or FIXED)
    is_dummy, args.mode = args.shapes is not None, LIKE
    if args.acceptance is not None and not is_dummy:
        raise ValueError(
            "--acceptance needs --shapes: a checkpoint accepts by its confidence"
        )
    accepted = read_acceptance(args.acceptance or EXAMPLE) if is_dummy else None
    if args.tokens_per_forward is not None:
        raise ValueError(
            "--tokens-per-forward follows from --acceptance here: leave it out"
        )
    args.tokens_per_forward = 1.0 if is_dummy else None
    settings = settings_of(args)
    if "hf" in settings.versus or settings.versus and not is_dummy:
        raise ValueError(
            "--vs ar is the one baseline here, and it needs --shapes: leave --vs out"
        )
    canvas = settings.canvas[0]
    if len(settings.canvas) > 1 or max(widths, default=1) > canvas:
        raise ValueError(
            f"--canvas must be one length of at least {max(widths, default=1)} positions, got "
            f"{','.join(map(str, settings.canvas))}"
        )
    engines.prepare()
    progress = report.Progress()
    line: dict[str, Any] = report.surroundings(settings, command) | {"benchmark": MODE}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        model = engines.find_model(settings, Path(folder))
        length = context_needed(settings, model)
        settings = engines.with_dtype(settings, model, length)
        options = engines.options_of_ours(settings, model, canvas, length)
        options["additional_config"] = {"dllm": _dllm(settings, canvas, args)}
        llm = engines.start(settings, options)
        progress.done("engine start")
        asks = _Asks(settings, model, llm)
        rest, rows = BLOCKS if args.adaptive == "off" else BY_LOAD, []
        grid = settings.grid_requests(canvas)
        if accepted is not None:
            _accept(llm, accepted, settings.seed, asks, max(grid))
        for n in grid:
            # Widths by load first: they are asked for most, and a run may be interrupted.
            for width in (None, *widths):
                teaches = rest == BY_LOAD and width is None and n == grid[0]
                done = _serve(llm, settings, asks, n, width, teaches)
                rows.append(_row(n, width or rest, done))
                progress.done(
                    f"{n} requests, {_named(width or rest)}", json.dumps(rows[-1])
                )
        line |= {"engine": engines.describe(llm), "acceptance": accepted}
        stop_engine(llm)
        del llm  # the next start takes what is still there out of collections
        if "ar" in settings.versus:
            plain = _plain(settings, model, length, Path(folder), progress)
            rows = [row | _beside(row, plain) for row in rows]
    print(_table(rows))
    print(json.dumps(line | {"rows": rows, "seconds": progress.seconds}))
    return 0


def _accept(
    llm: "LLM", accepted: tuple[float, float], seed: int, asks: "_Asks", at_once: int
) -> None:
    """Accept by drawn numbers, and compile what that changes: for one request and for more."""
    llm.collective_rpc("accept", args=(*accepted, seed))
    for few in range(1, min(2, at_once) + 1):
        serve(llm, asks.take(few, None, only_warms=True), few)


def _widths(text: str) -> list[int]:
    if text == NO_WIDTHS:
        return []
    words = text.split(",")
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise ValueError(
            f"--widths must be whole numbers of at least 1 as in 2,8, or {NO_WIDTHS}, got {text!r}"
        )
    return sorted({int(word) for word in words})


def _named(width: int | str) -> str:
    return width if isinstance(width, str) else f"width {width}"


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

    def take(
        self, count: int, width: int | None, only_warms: bool = False
    ) -> list[Ask]:
        """Return so many requests of a fixed width, or of widths by load."""
        settings = self.settings
        most = WARMUP_TOKENS if only_warms else settings.output_len
        sampling: dict[str, Any] = {"max_tokens": min(most, settings.output_len)}
        if width is not None:
            sampling["extra_args"] = {"dllm_schedule": [width]}
        if not self.is_real:
            longest = WARMUP_PROMPT if only_warms else settings.input_len
            length = min(longest, settings.input_len)
            return [self.prompts.ask(length, **sampling) for _ in range(count)]
        found = problem_prompts(self.llm.get_tokenizer(), problems_of(count))
        return [Ask(prompt, sampling) for prompt in found]


def _serve(
    llm: "LLM",
    settings: Settings,
    asks: _Asks,
    at_once: int,
    width: int | None,
    teaches: bool = False,
) -> Run:
    """Serve requests of one width; before them a few tokens, or what teaches the controller.

    It keeps what it learned, so the first number of requests teaches it for all.
    """
    serve(llm, asks.take(at_once, width, only_warms=not teaches), at_once)
    return serve(llm, asks.take(at_once * settings.rounds, width), at_once)


def _plain(
    settings: Settings,
    model: Model,
    length: int,
    scratch: Path,
    progress: report.Progress,
) -> dict[int, float]:
    """Return the tokens per second of plain vLLM, by requests at once."""
    llm = engines.start_autoregressive(
        settings, model, length, scratch, not engines.on_cpu()
    )
    progress.done("engine start, plain vLLM")
    asks, rates = _Asks(settings, model, llm), {}
    for n in settings.requests:
        done = _serve(llm, settings, asks, n, None)
        rates[n] = _tokens(done) / done.seconds
        progress.done(f"{n} requests, plain vLLM", f"{rates[n]:.1f} tokens/s")
    stop_engine(llm)
    return rates


def _beside(row: dict[str, Any], plain: dict[int, float]) -> dict[str, float]:
    """Return a row's columns about plain vLLM at as many requests."""
    rate = plain[row["requests"]]
    return {"ar_tokens_per_s": rate, "speedup_vs_ar": row["tokens_per_s"] / rate}


def _tokens(run: Run) -> int:
    return sum(len(answer.token_ids) for answer in run.answers)


def _row(n: int, width: int | str, run: Run) -> dict[str, Any]:
    """Return what is said of a run."""
    tokens, forwards = _tokens(run), sum(answer.forwards for answer in run.answers)
    positions = sum(answer.canvas_positions for answer in run.answers)
    return {
        "requests": n,
        "width": width,
        "tokens_per_s": tokens / run.seconds,
        "tokens_per_forward": tokens / forwards,
        "mean_width": positions / forwards,
        "seconds": run.seconds,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [
        f"{'requests':>8} {'width':>8} {'tokens/s':>10} {'/forward':>9} {'by AR':>6}"
    ]
    for row in rows:
        plain = f"{row['speedup_vs_ar']:.2f}" if "speedup_vs_ar" in row else "-"
        lines.append(
            f"{row['requests']:>8} {row['width']:>8} {row['tokens_per_s']:>10.1f} "
            f"{row['tokens_per_forward']:>9.2f} {plain:>6}"
        )
    return "\n".join(lines)
