"""Run ``diffuplug bench adaptive`` on models that verify their drafts: tokens per second by load.

Weights are dummies: each draft is accepted by a random number, with the probability at which
endless drafts would bring ``--acceptance`` tokens a round. Plain vLLM is measured first, and steps
are timed in the engine that drafts. The bound of a row is its tokens per forward, divided by the
time of its forwards in plain ones; `of_bound` is the share of it that the tokens per second reach
by plain vLLM's, while all requests decode. Below the acceptance `break_even` no drafts pay. A
window has no drafts: its first masks take their tokens, as many as such drafts would be accepted.

The floor of a step is the time of its GEMMs, measured in the same engine. Every row of a forward is
a row of the LM head, whether it drafts, verifies or both. A step of the table of forwards is one
forward and its LM head; that of the table of drafts is a step of the engine, all of it.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diffuplug_bench import engines, report
from diffuplug_bench.adaptive.widths import BY_LOAD, NO_WIDTHS, Requests, plain_engine
from diffuplug_bench.options import settings_of, whole_numbers
from diffuplug_bench.request_loop import Run, decode_rate, decoding_steps
from diffuplug_bench.serving.requests import context_needed
from diffuplug_bench.settings import DRAFTS, Settings
from diffuplug_bench.step.floor import between, only_ms
from diffuplug_bench.step.profile import trace_steps
from dllm_plugin.commands.offline import stop_engine
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.decoding.acceptance import SHARES
from dllm_plugin.decoding.families import BLOCK_DIFFUSION, CAUSAL_WINDOW
from dllm_plugin.decoding.widths import doubled

TOKENS = "2,4,6"  # of a round, by default
Times = dict[tuple[int, int], float]  # ms, by requests and rows of each
# Of drafts or a window, by name; None: the engine's.
Lengths = dict[int | str, int | None]


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure each acceptance at every number of requests; print tables and one JSON line."""
    settings, accepted, lengths = _settings(args)
    engines.prepare()
    progress = report.Progress()
    line = report.surroundings(settings, command) | {"benchmark": "drafts"}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        scratch = Path(folder)
        trace = scratch if settings.profile else None
        model = engines.find_model(settings, scratch)
        length = context_needed(settings, model)
        of_plain = (settings, model, length, scratch, progress, line)
        plain: dict[int, Run] = {}
        if not engines.on_cpu():
            plain = _plain_runs(*of_plain)
        canvas = settings.canvas[0]
        options = engines.options_of_ours(settings, model, canvas, length, trace)
        options["additional_config"] = {"dllm": _dllm(settings, args.strategy)}
        options["cudagraph_metrics"] = True  # counts positions in a step's message
        llm = engines.start(settings, options)
        progress.done("engine start")
        requests = Requests(settings, model, llm, f"dllm_{_length(args.strategy)}")
        method = get_decode_config(llm.llm_engine.vllm_config).method
        rows_of = method.rows or int
        widths = {rows_of(drafts) for drafts in doubled(settings.block(canvas))}
        times = _time_steps(llm, settings, sorted(widths | {1}))
        even = break_even(method.drafted or tokens_of_window, times)
        progress.done("steps", report.table_of("break_even", even))
        positions = sorted({requests * rows for requests, rows in times})
        whole, _, _ = llm.collective_rpc("time_gemms", args=(positions, None))[0]
        gemms = only_ms(whole)
        forwards = beside_gemms(times, gemms)
        progress.done("floor", report.table_of("forwards", forwards))
        given = (accepted, lengths, times, gemms, even, plain, progress)
        rows = _measure(requests, *given)
        line["profile"] = _profile(requests, trace, progress)
        line |= {"engine": engines.describe(llm), "acceptance": accepted}
        stop_engine(llm)
        del llm, requests  # the next start leaves what is still there uncollected
        if engines.on_cpu():
            # Within one process vLLM extends the class of our worker, not after that of its own.
            plain = _plain_runs(*of_plain)
    for row in rows:
        if plain:
            _compare(row, plain[row["requests"]])
    print(report.table_of("drafts", rows))
    print(f"break-even:\n{report.table_of('break_even', even)}")
    print(json.dumps(line | {"rows": rows, "steps": forwards, "break_even": even}))
    return 0


def _plain_runs(
    settings: Settings,
    model: engines.Model,
    length: int,
    scratch: Path,
    progress: report.Progress,
    line: dict[str, Any],
) -> dict[int, Run]:
    """Return a run of plain vLLM at every number of requests; none unless asked for."""
    runs: dict[int, Run] = {}
    if "ar" not in settings.versus:
        return runs
    trace = scratch if settings.profile else None
    with plain_engine(settings, model, length, scratch, progress, trace) as requests:
        for n in settings.requests:
            runs[n] = requests.serve(n, None)
            rate = decode_rate(runs[n], n)
            progress.done(f"{n} requests, plain vLLM", f"{rate:.1f} tokens/s")
        line["plain_profile"] = _profile(requests, trace, progress)
    return runs


def _measure(
    requests: Requests,
    accepted: list[int],
    lengths: Lengths,
    times: Times,
    gemms: dict[int, float],
    even: list[dict[str, Any]],
    plain: dict[int, Run],
    progress: report.Progress,
) -> list[dict[str, Any]]:
    """Return a row for each acceptance, number of requests and length."""
    settings, rows = requests.settings, list[dict[str, Any]]()
    least = {row["requests"]: row["acceptance"] for row in even}
    # From the highest on: the controller learns only while it drafts.
    for tokens in reversed(accepted):
        share = 1 - 1 / tokens
        requests.llm.collective_rpc("accept_drafts", args=(share, settings.seed))
        if not rows:
            requests.compile(max(settings.requests))
        for n in settings.requests:
            for name, fixed in lengths.items():
                teaches = fixed is None and n == settings.requests[0]
                done = requests.serve(n, fixed, teaches)
                row = _row(n, tokens, name, done)
                row |= {"break_even": least[n], "bound": bound(row, times)}
                row |= served_step(done, n, gemms)
                if n in plain:
                    _compare(row, plain[n])
                rows.append(row)
                table = report.table_of("drafts", [row])
                progress.done(f"{n} requests, {tokens}", table)
    return rows


def _compare(row: dict[str, Any], plain: Run) -> None:
    """Add the tokens per second of plain vLLM, and the shares that are judged."""
    rate = plain.tokens / plain.seconds
    decode = decode_rate(plain, row["requests"])
    speedup = row["decode_tokens_per_s"] / decode
    row |= {"ar_tokens_per_s": rate, "ar_decode_tokens_per_s": decode}
    row["speedup_vs_ar"] = row["tokens_per_s"] / rate
    row |= {"decode_speedup": speedup, "of_bound": speedup / row["bound"]}


def _profile(
    requests: Requests, trace: Path | None, progress: report.Progress
) -> list[dict[str, Any]]:
    """Return where a step's time goes, for the fewest requests and the two largest numbers."""
    found: list[dict[str, Any]] = []
    if trace is None:
        return found
    counts = requests.settings.requests
    for n in sorted({counts[0], *counts[-2:]}):
        done = requests.serve(n, None)
        begin, end = decoding_steps(done, n)
        step_ms = 1e3 * (done.stamps[end] - done.stamps[begin]) / (end - begin)
        asks = requests.take(n, None)
        found.append(trace_steps(requests.llm, asks, trace, step_ms, refreshes=True))
        table = report.table_of("profile", found[-1:])
        largest = {name: found[-1].get(name) for name in ("largest", "forward_largest")}
        progress.done(f"profile of {n} requests", f"{table}\n{json.dumps(largest)}")
    return found


def _settings(args: argparse.Namespace) -> tuple[Settings, list[int], Lengths]:
    """Return the settings, tokens of a round, and the engine's and fixed lengths."""
    if args.shapes is None:
        raise ValueError(f"--strategy {args.strategy} needs --shapes here")
    refusal = "--acceptance must be whole numbers of tokens a round, as in 2,4,6"
    accepted = whole_numbers(args.acceptance or TOKENS, refusal)
    longest = args.block_length or DRAFTS[args.strategy]
    by_load = args.strategy != CAUSAL_WINDOW
    lengths: Lengths = {BY_LOAD if by_load else longest: None}
    if args.widths not in (None, NO_WIDTHS):
        for fixed in whole_numbers(args.widths, "--widths must be lengths of drafts"):
            lengths[fixed] = fixed
    # Its options are those of a served mode; the strategy is named when the engine starts.
    named = argparse.Namespace(**vars(args) | {"strategy": BLOCK_DIFFUSION})
    settings = settings_of(named, mode="throughput", tokens_per_forward=1.0)
    canvas = (2 * longest,)
    return replace(settings, canvas=canvas, block_length=longest), accepted, lengths


def _dllm(settings: Settings, strategy: str) -> dict[str, Any]:
    """Return the decode options of the engine."""
    longest = settings.block(settings.canvas[0])
    options = {"strategy": strategy, _length(strategy): longest}
    return options | settings.switches


def _length(strategy: str) -> str:
    """Return the option that has the length of drafts, or of a window."""
    return "window" if strategy == CAUSAL_WINDOW else "block_length"


def tokens_of_window(rows: int, share: float) -> float:
    """Return the tokens of a forward of so many rows, half of them masks."""
    return float((1 - share ** (rows // 2)) / (1 - share))


def _row(n: int, tokens: int, length: int | str, run: Run) -> dict[str, Any]:
    """Return the columns of a run."""
    return {
        "requests": n,
        "acceptance": tokens,
        "length": length,
        "tokens_per_s": run.tokens / run.seconds,
        "decode_tokens_per_s": decode_rate(run, n),
        "tokens_per_forward": run.tokens / run.forwards,
        "mean_rows": run.canvas_positions / run.forwards,
    }


def _time_steps(llm: Any, settings: Settings, widths: list[int]) -> Times:
    """Return the time of every step, in the middle of an answer."""
    context = settings.input_len + settings.output_len // 2
    arguments = (list(settings.requests), widths, [context])
    timed = llm.collective_rpc("time_steps", args=arguments)[0]
    return {(n, rows): ms for n, rows, _, ms in timed}


def beside_gemms(times: Times, gemms: dict[int, float]) -> list[dict[str, Any]]:
    """Return a row for every timed forward: its time beside that of its GEMMs."""
    found = []
    for (n, rows), ms in times.items():
        floor = gemms[n * rows]
        row = {"requests": n, "rows": rows, "ms": ms, "gemm_ms": floor}
        found.append(row | {"times_gemms": ms / floor})
    return found


def served_step(run: Run, n: int, gemms: dict[int, float]) -> dict[str, Any]:
    """Return the time of a step while `n` requests decode, and that of its GEMMs.

    Nothing if the engine did not count the positions of its steps.
    """
    begin, end = decoding_steps(run, n)
    counts = [one.positions for one in run.counts[begin + 1 : end + 1]]
    floors = [between(gemms, count) for count in counts if count]
    if not floors:
        return {}
    step_ms = 1e3 * (run.stamps[end] - run.stamps[begin]) / (end - begin)
    floor = statistics.mean(floors)
    return {"step_ms": step_ms, "gemm_ms": floor, "times_gemms": step_ms / floor}


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
