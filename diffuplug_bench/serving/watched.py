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
            asks = _asks(settings, canvas, requests, prompts)
            rounds.append(streams.read_all(url, streams.bodies_of(asks, watched)))
        forwards = (forwards_of(url) - before) / requests / settings.rounds
        row: dict[str, Any] = {"requests": requests, "watched": watched}
        row |= {"canvas": canvas, "forwards_per_request": forwards}
        block = settings.block(canvas)
        steps = round(forwards * block / settings.output_len)
        row |= _row(rounds[WARMUP_ROUNDS:], settings.output_len, steps / block, watched)
        unwatched = rows[0] if rows else row
        row["share_of_unwatched"] = row["tokens_per_s"] / unwatched["tokens_per_s"]
        rows.append(row)
    return rows


def _asks(
    settings: Settings, canvas: int, requests: int, prompts: Prompts
) -> list[Ask]:
    steps = int(settings.steps_of_block(canvas))
    sampling = {
        "max_tokens": settings.output_len,
        "extra_args": {"dllm_policy": "low_confidence", "dllm_steps": steps},
    }
    return prompts.several(requests, settings.input_len, **sampling)


def _row(
    rounds: list[list[Stream]], length: int, steps_per_token: float, watched: int
) -> dict[str, Any]:
    """Return the numbers of some rounds, of answers of `length` tokens."""
    answers: list[Stream] = []
    seen: list[Stream] = []
    seconds = 0.0
    for found in rounds:
        answers += found
        seen += found[:watched]
        seconds += max(s.ended for s in found) - min(s.sent for s in found)
    assert {answer.tokens for answer in answers} == {length}
    tokens = len(answers) * length
    row = {
        "rounds": len(rounds),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "step_ms": _step_ms(rounds, steps_per_token),
        "first_text_s": statistics.median(s.texts[0][0] - s.sent for s in answers),
        "kb_per_request": statistics.mean(s.received for s in answers) / 1e3,
    }
    if seen:
        row["frames_per_request"] = statistics.mean(stream.frames for stream in seen)
        if not row["frames_per_request"]:
            raise ValueError(
                "the server sent no frames: install this package with its entry points."
            )
    return row


def _step_ms(rounds: list[list[Stream]], steps_per_token: float) -> float | None:
    """Return the time of a step while all requests run, the median of the rounds' streams.

    A block's text comes with the step that commits it. None if no stream had two texts meanwhile:
    on a busy host texts are read together at the end.
    """
    pace = []
    for found in rounds:
        first = max(stream.texts[0][0] for stream in found)
        last = min(stream.texts[-1][0] for stream in found)
        for stream in found:
            inside = [text for text in stream.texts if first <= text[0] <= last]
            if len(inside) > 1:
                tokens = sum(count for _, count in inside[1:])
                seconds = inside[-1][0] - inside[0][0]
                pace.append(seconds / (steps_per_token * tokens))
    return 1e3 * statistics.median(pace) if pace else None
