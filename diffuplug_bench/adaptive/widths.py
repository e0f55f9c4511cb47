"""Run ``diffuplug bench adaptive``: tokens per second of each width, and of widths by load.

One engine with floating canvases serves all of it: a fixed width is a schedule of requests. Dummy
weights accept masks by random numbers (``--acceptance``), checkpoints by their confidence.
Each row is printed once it is measured, as JSON.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffuplug_bench import engines, report
from diffuplug_bench.engines import Model, Prompts
from diffuplug_bench.options import (
    FIXED_WIDTHS,
    one_canvas,
    settings_of,
    whole_numbers,
)
from diffuplug_bench.problems import problem_prompts
from diffuplug_bench.request_loop import Ask, Run, serve
from diffuplug_bench.serving.requests import context_needed
from diffuplug_bench.settings import ADAPTIVE, DRAFTS, Settings
from diffuplug_bench.word_problems.generator import problems_of
from dllm_plugin.commands.forecast import EXAMPLE, read_acceptance
from dllm_plugin.commands.offline import stop_engine

if TYPE_CHECKING:
    from vllm import LLM

BY_LOAD, BLOCKS, NO_WIDTHS = "by load", "blocks", "none"
# At most, of requests that only warm an engine up.
WARMUP_PROMPT, WARMUP_TOKENS = 512, 32


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure every width at every number of requests; print a table and one JSON line."""
    if args.strategy in DRAFTS:
        from diffuplug_bench.adaptive import drafts

        return drafts.run(args, command)
    widths = _widths(args)
    settings, accepted = _settings(args)
    canvas = one_canvas(settings.canvas, max(widths, default=1))
    by_blocks = args.adaptive == "off"
    engines.prepare()
    progress = report.Progress()
    line = report.surroundings(settings, command) | {"benchmark": ADAPTIVE}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        model = engines.find_model(settings, Path(folder))
        length = context_needed(settings, model)
        settings = engines.with_dtype(settings, model, length)
        options = engines.options_of_ours(settings, model, canvas, length)
        options["additional_config"] = {"dllm": _dllm(settings, canvas, args)}
        llm = engines.start(settings, options)
        progress.done("engine start")
        requests = Requests(settings, model, llm)
        grid = settings.grid_requests(canvas)
        if accepted is not None:
            llm.collective_rpc("accept", args=(*accepted, settings.seed))
            requests.compile(max(grid))
        rows = []
        for n in grid:
            # Widths by load first: they are asked for most, and a run may be interrupted.
            for width in (None, *widths):
                teaches = not by_blocks and width is None and n == grid[0]
                done = requests.serve(n, width, teaches)
                named = width or (BLOCKS if by_blocks else BY_LOAD)
                rows.append(_row(n, named, done))
                what = named if width is None else f"width {width}"
                progress.done(f"{n} requests, {what}", json.dumps(rows[-1]))
        line |= {"engine": engines.describe(llm), "acceptance": accepted}
        stop_engine(llm)
        del llm, requests  # the next start leaves what is still there uncollected
        if "ar" in settings.versus:
            add_plain(rows, settings, model, length, Path(folder), progress)
    print(report.table_of("adaptive", rows))
    print(json.dumps(line | {"rows": rows, "seconds": progress.seconds}))
    return 0


def _widths(args: argparse.Namespace) -> list[int]:
    # Without floating canvases nothing has a width: the usual blocks are measured.
    if args.adaptive == "off":
        if args.widths is not None:
            raise ValueError(
                f"--widths {args.widths} has no effect with --adaptive off: leave one of them out"
            )
        return []
    if args.widths == NO_WIDTHS:
        return []
    refusal = f"--widths must be whole numbers of at least 1 as in 2,8, or {NO_WIDTHS}"
    return whole_numbers(args.widths or FIXED_WIDTHS, refusal)


def _settings(
    args: argparse.Namespace,
) -> tuple[Settings, tuple[float, float] | None]:
    """Return the settings and, with dummy weights, their acceptance."""
    if args.approximations:
        raise ValueError(
            "--approximations are of full attention, which has no widths: leave it out"
        )
    is_dummy = args.shapes is not None
    if args.acceptance is not None and not is_dummy:
        raise ValueError(
            "--acceptance needs --shapes: a checkpoint accepts by its confidence"
        )
    if args.tokens_per_forward is not None:
        raise ValueError(
            "--tokens-per-forward follows from --acceptance here: leave it out"
        )
    accepted = read_acceptance(args.acceptance or EXAMPLE) if is_dummy else None
    # Options and requests are those of the mode throughput.
    rate = 1.0 if is_dummy else None
    settings = settings_of(args, mode="throughput", tokens_per_forward=rate)
    if settings.profile:
        raise ValueError(
            "--profile traces the strategies that verify drafts: leave it out"
        )
    if "hf" in settings.versus or settings.versus and not is_dummy:
        raise ValueError(
            "--vs ar is the one baseline here, and it needs --shapes: leave --vs out"
        )
    return settings, accepted


def _dllm(settings: Settings, canvas: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the decode options of the engine; by default a window may be a whole canvas."""
    options = settings.dllm(canvas)
    options.pop("policy", None)
    if settings.block_length is None and args.adaptive != "off":
        options["block_length"] = canvas
    options["adaptive"] = args.adaptive
    if args.min_window is not None:
        options["min_window"] = args.min_window
    return options


class Requests:
    """Serve word problems on a checkpoint, random prompts on dummy weights."""

    def __init__(
        self,
        settings: Settings,
        model: Model,
        llm: "LLM",
        fixes: str = "dllm_schedule",
    ) -> None:
        """Serve by an engine; `fixes`: the argument that fixes a request's width."""
        self.settings, self.is_real, self.llm = settings, model.is_real, llm
        self.fixes = fixes
        self.prompts = Prompts(model.config, settings.seed)

    def serve(self, at_once: int, width: int | None, teaches: bool = False) -> Run:
        """Serve requests of a fixed width, or of widths by load, after a few for warm-up.

        The controller keeps what it learned, so the warm-up that `teaches` is as long as a round.
        """
        warmup = self.take(at_once, width, only_warms=not teaches)
        serve(self.llm, warmup, at_once)
        asks = self.take(at_once * self.settings.rounds, width)
        return serve(self.llm, asks, at_once)

    def compile(self, at_once: int) -> None:
        """Compile a step of one request, and of more."""
        for few in range(1, min(2, at_once) + 1):
            serve(self.llm, self.take(few, None, only_warms=True), few)

    def take(
        self, count: int, width: int | None, only_warms: bool = False
    ) -> list[Ask]:
        length, tokens = self.settings.input_len, self.settings.output_len
        if only_warms:
            length, tokens = min(WARMUP_PROMPT, length), min(WARMUP_TOKENS, tokens)
        sampling: dict[str, Any] = {"max_tokens": tokens}
        if width is not None:
            is_list = self.fixes == "dllm_schedule"
            sampling["extra_args"] = {self.fixes: [width] if is_list else width}
        if not self.is_real:
            return self.prompts.several(count, length, **sampling)
        found = problem_prompts(self.llm.get_tokenizer(), problems_of(count))
        return [Ask(prompt, sampling) for prompt in found]


def add_plain(
    rows: list[dict[str, Any]],
    settings: Settings,
    model: Model,
    length: int,
    scratch: Path,
    progress: report.Progress,
) -> None:
    """Add the tokens per second of plain vLLM at as many requests to each row."""
    with plain_engine(settings, model, length, scratch, progress) as requests:
        for n in settings.requests:
            done = requests.serve(n, None)
            rate = done.tokens / done.seconds
            progress.done(f"{n} requests, plain vLLM", f"{rate:.1f} tokens/s")
            for row in rows:
                if row["requests"] == n:
                    row["ar_tokens_per_s"] = rate
                    row["speedup_vs_ar"] = row["tokens_per_s"] / rate


@contextmanager
def plain_engine(
    settings: Settings,
    model: Model,
    length: int,
    scratch: Path,
    progress: report.Progress,
    trace: Path | None = None,
) -> Iterator[Requests]:
    """Start plain vLLM for requests, and end it after them."""
    compiled = not engines.on_cpu()
    llm = engines.start_autoregressive(
        settings, model, length, scratch, compiled, trace
    )
    progress.done("engine start, plain vLLM")
    yield Requests(settings, model, llm)
    stop_engine(llm)


def _row(n: int, width: int | str, run: Run) -> dict[str, Any]:
    """Return the columns of a run."""
    return {
        "requests": n,
        "width": width,
        "tokens_per_s": run.tokens / run.seconds,
        "tokens_per_forward": run.tokens / run.forwards,
        "mean_width": run.canvas_positions / run.forwards,
        "seconds": run.seconds,
    }
