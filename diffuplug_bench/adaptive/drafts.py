"""Run ``diffuplug bench adaptive`` on models that verify their drafts: tokens per second by load.

Weights are dummies: each draft is accepted by a random number, with the probability at which
endless drafts would bring ``--acceptance`` tokens a round. Steps are timed in the same engine, so
that each row has its bound: the tokens per forward by what a forward costs more than a plain one.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diffuplug_bench import engines, report
from diffuplug_bench.adaptive.widths import BY_LOAD, NO_WIDTHS, Requests, add_plain
from diffuplug_bench.options import settings_of, whole_numbers
from diffuplug_bench.request_loop import Run
from diffuplug_bench.serving.requests import context_needed
from diffuplug_bench.settings import DRAFTS, Settings
from dllm_plugin.commands.offline import stop_engine
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.decoding.acceptance import SHARES
from dllm_plugin.decoding.families import BLOCK_DIFFUSION
from dllm_plugin.decoding.widths import doubled

TOKENS = "2,4,6"  # of a round, by default
Times = dict[tuple[int, int], float]  # ms, by requests and rows of each


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure each acceptance at every number of requests; print tables and one JSON line."""
    settings, accepted, lengths = _settings(args)
    engines.prepare()
    progress = report.Progress()
    line = report.surroundings(settings, command) | {"benchmark": "drafts"}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        model = engines.find_model(settings, Path(folder))
        longest = settings.block(settings.canvas[0])
        length = context_needed(settings, model)
        canvas = settings.canvas[0]
        options = engines.options_of_ours(settings, model, canvas, length)
        options["additional_config"] = {"dllm": _dllm(settings, args.strategy)}
        llm = engines.start(settings, options)
        progress.done("engine start")
        method = get_decode_config(llm.llm_engine.vllm_config).method
        requests = Requests(settings, model, llm, "dllm_block_length")
        rows: list[dict[str, Any]] = []
        # From the highest on: the controller learns only while it drafts.
        for tokens in reversed(accepted):
            share = 1 - 1 / tokens
            llm.collective_rpc("accept_drafts", args=(share, settings.seed))
            if not rows:
                requests.compile(max(settings.requests))
            for n in settings.requests:
                for fixed in (None, *lengths):
                    teaches = fixed is None and n == settings.requests[0]
                    done = requests.serve(n, fixed, teaches)
                    rows.append(_row(n, tokens, fixed or BY_LOAD, done))
                    progress.done(f"{n} requests, {tokens}", json.dumps(rows[-1]))
        rows_of = method.rows or int
        widths = [rows_of(drafts) for drafts in doubled(longest)]
        context = settings.input_len + settings.output_len // 2
        times = _time_steps(llm, settings, widths, context)
        progress.done("steps")
        line |= {"engine": engines.describe(llm), "acceptance": accepted}
        stop_engine(llm)
        del llm, requests  # the next start leaves what is still there uncollected
        for row in rows:
            row["bound"] = bound(row, times)
        if "ar" in settings.versus:
            add_plain(rows, settings, model, length, Path(folder), progress)
    print(report.table_of("drafts", rows))
    even = break_even(method.drafted, times)
    print(f"break-even:\n{report.table_of('break_even', even)}")
    steps = [(*load, ms) for load, ms in times.items()]
    print(json.dumps(line | {"rows": rows, "steps": steps, "break_even": even}))
    return 0


def _settings(args: argparse.Namespace) -> tuple[Settings, list[int], list[int]]:
    """Return the settings, tokens of a round, and fixed lengths of drafts."""
    if args.shapes is None:
        raise ValueError(f"--strategy {args.strategy} needs --shapes here")
    refusal = "--acceptance must be whole numbers of tokens a round, as in 2,4,6"
    accepted = whole_numbers(args.acceptance or TOKENS, refusal)
    lengths: list[int] = []
    if args.widths not in (None, NO_WIDTHS):
        lengths = whole_numbers(args.widths, "--widths must be lengths of drafts")
    longest = args.block_length or DRAFTS[args.strategy]
    # Its options are those of a served mode; the strategy is named when the engine starts.
    named = argparse.Namespace(**vars(args) | {"strategy": BLOCK_DIFFUSION})
    settings = settings_of(named, mode="throughput", tokens_per_forward=1.0)
    canvas = (2 * longest,)
    return replace(settings, canvas=canvas, block_length=longest), accepted, lengths


def _dllm(settings: Settings, strategy: str) -> dict[str, Any]:
    """Return the decode options of the engine."""
    longest = settings.block(settings.canvas[0])
    options = {"strategy": strategy, "block_length": longest}
    return options | settings.switches


def _row(n: int, tokens: int, length: int | str, run: Run) -> dict[str, Any]:
    """Return the columns of a run."""
    return {
        "requests": n,
        "acceptance": tokens,
        "length": length,
        "tokens_per_s": run.tokens / run.seconds,
        "tokens_per_forward": run.tokens / run.forwards,
        "mean_rows": run.canvas_positions / run.forwards,
    }


def _time_steps(llm: Any, settings: Settings, widths: list[int], context: int) -> Times:
    """Return the time of every step."""
    arguments = (list(settings.requests), widths, [context])
    timed = llm.collective_rpc("time_steps", args=arguments)[0]
    return {(n, rows): ms for n, rows, _, ms in timed}


def bound(row: dict[str, Any], times: Times) -> float:
    """Return by how much a row can be faster than plain steps: times are interpolated."""
    n = row["requests"]
    known = sorted(rows for requests, rows in times if requests == n)
    ms = np.interp(row["mean_rows"], known, [times[n, rows] for rows in known])
    return float(row["tokens_per_forward"] * times[n, 1] / ms)


def break_even(drafted: Any, times: Times) -> list[dict[str, Any]]:
    """Return for each load the least acceptance at which drafts pay, and their rows."""
    found = []
    for n in sorted({requests for requests, _ in times}):
        best: tuple[float, int] = (float("inf"), 1)
        for (requests, rows), ms in times.items():
            if requests != n or rows == 1:
                continue
            needed = ms / times[n, 1]
            pays = [share for share in SHARES if drafted(rows, share) >= needed]
            if pays:
                best = min(best, (1 / (1 - float(pays[0])), rows))
        row = {"requests": n, "plain_ms": times[n, 1], "rows": best[1]}
        found.append(row | {"acceptance": best[0]})
    return found
