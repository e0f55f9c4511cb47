"""Run ``diffuplug bench watched``: what frames of some requests cost all of them, over HTTP.

A server with dummy weights answers the same number of requests, all sent at once on one fixed
schedule, while none, some or all of them stream their frames.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffuplug_bench import engines, report
from diffuplug_bench.engines import Model, Prompts
from diffuplug_bench.request_loop import Ask
from diffuplug_bench.serving import streams
from diffuplug_bench.serving.requests import context_needed
from diffuplug_bench.serving.server import (
    fill_weights,
    forwards_of,
    serving,
    write_tokenizer,
)
from diffuplug_bench.serving.streams import Stream
from diffuplug_bench.settings import Settings

WARMUP_ROUNDS = 1  # a step compiles when it is first watched, or first not


def run(settings: Settings, command: Sequence[str]) -> int:
    """Measure each canvas on a server of its own; end in one JSON line."""
    progress = report.Progress()
    line: dict[str, Any] = report.surroundings(settings, command) | {"watched": []}
    with tempfile.TemporaryDirectory(prefix="diffuplug-") as folder:
        scratch = Path(folder)
        model = engines.find_model(settings, scratch)
        tokenizer = write_tokenizer(model.config, scratch / "tokenizer")
        prompts = Prompts(model.config, settings.seed)
        for canvas in settings.canvas:
            options = _options(settings, model, canvas, tokenizer)
            with serving(options, scratch / "server.log") as url:
                fill_weights(url, settings.seed)
                progress.done(f"server start, canvas {canvas}")
                for requests in settings.grid_requests(canvas):
                    line["watched"] += _measure(
                        url, settings, canvas, requests, prompts
                    )
            table = report.table_of("watched", line["watched"])
            progress.done(f"requests, canvas {canvas}", table)
    print(json.dumps(line | {"seconds": progress.seconds}))
    return 0


def _options(
    settings: Settings, model: Model, canvas: int, tokenizer: str
) -> dict[str, Any]:
    length = context_needed(settings, model)
    options = engines.options_of_ours(settings, model, canvas, length)
    return options | {"tokenizer": tokenizer, "skip_tokenizer_init": False}


def _measure(
    url: str, settings: Settings, canvas: int, requests: int, prompts: Prompts
) -> list[dict[str, Any]]:
    """Return a row for each number of watched requests; the first has none."""
    rows: list[dict[str, Any]] = []
    for watched in sorted({0, *settings.watched}):
        if watched > requests:
            continue
        rounds: list[list[Stream]] = []
        for i in range(WARMUP_ROUNDS + settings.rounds):
            if i == WARMUP_ROUNDS:
                before = forwards_of(url)
            bodies = streams.bodies_of(
                _asks(settings, canvas, requests, prompts), watched
            )
            rounds.append(streams.read_all(url, bodies))
        row: dict[str, Any] = {
            "requests": requests,
            "watched": watched,
            "canvas": canvas,
        }
        row["forwards_per_request"] = (
            (forwards_of(url) - before) / requests / settings.rounds
        )
        block = settings.block(canvas)
        steps = round(row["forwards_per_request"] * block / settings.output_len)
        row |= _row(rounds[WARMUP_ROUNDS:], settings.output_len, steps / block, watched)
        row["share_of_unwatched"] = (
            row["tokens_per_s"] / (rows or [row])[0]["tokens_per_s"]
        )
        rows.append(row)
    return rows


def _asks(
    settings: Settings, canvas: int, requests: int, prompts: Prompts
) -> list[Ask]:
    extra = {
        "dllm_policy": "low_confidence",
        "dllm_steps": int(settings.steps_of_block(canvas)),
    }
    output = settings.output_len
    return [
        prompts.ask(settings.input_len, max_tokens=output, extra_args=extra)
        for _ in range(requests)
    ]


def _row(
    rounds: list[list[Stream]], length: int, steps_per_token: float, watched: int
) -> dict[str, Any]:
    """Return the numbers of some rounds, of answers of `length` tokens."""
    answers = [stream for streams_of_round in rounds for stream in streams_of_round]
    assert {answer.tokens for answer in answers} == {length}
    seconds = [
        max(s.ended for s in found) - min(s.sent for s in found) for found in rounds
    ]
    seen = [stream for found in rounds for stream in found[:watched]]
    row = {
        "rounds": len(rounds),
        "tokens": len(answers) * length,
        "seconds": sum(seconds),
        "tokens_per_s": len(answers) * length / sum(seconds),
        "step_ms": _step_ms(rounds, steps_per_token),
        "first_text_s": statistics.median(s.texts[0][0] - s.sent for s in answers),
        "kb_per_request": statistics.mean(s.received for s in answers) / 1e3,
    }
    if seen and not sum(stream.frames for stream in seen):
        raise ValueError(
            "the server sent no frames: install this package with its entry points."
        )
    if seen:
        row["frames_per_request"] = statistics.mean(stream.frames for stream in seen)
    return row


def _step_ms(rounds: list[list[Stream]], steps_per_token: float) -> float | None:
    """Return the time of a step while all requests run, the median of the rounds' streams.

    A block's text comes with the step that commits it. None if no stream had two texts meanwhile:
    on a busy host texts are read together at the end.
    """
    pace = []
    for found in rounds:
        first, last = (
            max(s.texts[0][0] for s in found),
            min(s.texts[-1][0] for s in found),
        )
        for stream in found:
            inside = [
                (at, tokens) for at, tokens in stream.texts if first <= at <= last
            ]
            if len(inside) > 1:
                steps = steps_per_token * sum(tokens for _, tokens in inside[1:])
                pace.append((inside[-1][0] - inside[0][0]) / steps)
    return 1e3 * statistics.median(pace) if pace else None
