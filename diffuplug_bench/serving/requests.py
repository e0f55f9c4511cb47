"""Run ``diffuplug bench throughput`` and ``latency``: time whole requests in the front end."""

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diffuplug_bench.engines import Model, Prompts, decoding
from diffuplug_bench.model_shapes import Sizes
from diffuplug_bench.problems import problem_prompts, score
from diffuplug_bench.request_loop import Answer, Ask, Run, asking_for, serve
from diffuplug_bench.settings import Settings
from diffuplug_bench.step.floor import Floor
from diffuplug_bench.step.schedule import arguments, steps_of
from diffuplug_bench.step.sizes import all_forwards, run_again, sizes_of
from diffuplug_bench.word_problems.generator import problems_of

if TYPE_CHECKING:
    from vllm import LLM

REAL_INPUT = 512  # tokens that a word problem takes at most in any chat template
WARMUP_BLOCKS = 2
AR_WARMUP = 16  # tokens


def context_needed(settings: Settings, model: Model) -> int:
    """Return the context that every request fits into; for a checkpoint at most its own."""
    after_prompt = settings.output_len + 2 * max(settings.canvas)
    if model.is_real:
        return min(REAL_INPUT + after_prompt, Sizes.of(model.config).context)
    return settings.input_len + after_prompt


def grid(settings: Settings, canvas: int) -> list[tuple[str, int, str | None]]:
    """Return (mode, requests at once, approximation) of every grid point of a canvas."""
    points = []
    for variant in settings.variants:
        for mode in settings.request_modes:
            at_once = settings.grid_requests(canvas) if mode == "throughput" else (1,)
            points += [(mode, n, variant) for n in at_once]
    return points


def synthetic_requests(
    settings: Settings, canvas: int, prompts: Prompts, count: int
) -> list[Ask]:
    """Return requests whose schedule unmasks `tokens_per_forward`, whatever the weights."""
    assert settings.tokens_per_forward is not None
    asks = []
    for steps in steps_of(count, settings.block(canvas), settings.tokens_per_forward):
        extra = arguments(settings.schedule, steps)
        asks.append(
            prompts.ask(
                settings.input_len, max_tokens=settings.output_len, extra_args=extra
            )
        )
    return asks


def measure(
    llm: "LLM",
    settings: Settings,
    model: Model,
    canvas: int,
    prompts: Prompts,
    tell: Callable[[dict[str, Any]], None],
) -> list[tuple[dict[str, Any], list[Answer]]]:
    """Measure every grid point; return rows, each with its answers.

    Args:
        tell: called with each row as soon as its time is known, before anything is counted.
    """
    rows = []
    for mode, at_once, variant in grid(settings, canvas):
        count = at_once * settings.rounds
        problems = problems_of(count) if model.is_real else []
        if model.is_real:
            found = problem_prompts(llm.get_tokenizer(), problems)
            length = {"max_tokens": settings.output_len}
            asks = [Ask(prompt, length) for prompt in found]
        else:
            asks = synthetic_requests(settings, canvas, prompts, count)
        asks = [asking_for(ask, variant) for ask in asks]
        _warm_up(llm, asks, at_once, WARMUP_BLOCKS * settings.block(canvas))
        run = serve(llm, asks, at_once)
        row = {"mode": mode, "requests": at_once, "canvas": canvas} | _times(run)
        if variant is not None:
            row["approximation"] = variant
        tell(row)
        if settings.measured.full_attention:
            forwards = all_forwards(llm, run_again(llm, asks, at_once))
            row["step_sizes"] = sizes_of(run.counts, forwards)
            row["void_share"] = void_share(run)
        else:
            single_block_from = decoding(llm)["commit_alone_from"]
            row["positions"] = settings.positions_of_step(
                canvas, at_once, single_block_from
            )
        if model.is_real:
            ids = [answer.token_ids for answer in run.answers]
            row |= score(llm.get_tokenizer(), ids, problems, model.is_bundled)
        rows.append((row, run.answers))
    return rows


def measure_autoregressive(
    llm: "LLM", rows: list[tuple[dict[str, Any], list[Answer]]]
) -> list[dict[str, Any]]:
    """Measure the same prompts and numbers of tokens on plain vLLM, row by row.

    Rows of equal sizes, such as those of approximations on dummy weights, are measured once.
    """
    found: dict[str, dict[str, Any]] = {}
    sizes = []
    for row, answers in rows:
        place = {name: row[name] for name in ("mode", "requests", "canvas")}
        lengths = [(len(answer.prompt), len(answer.token_ids)) for answer in answers]
        sizes.append(f"{place} {lengths}")
        if sizes[-1] in found:
            continue
        asks = []
        for answer in answers:
            sampling = {"max_tokens": len(answer.token_ids), "ignore_eos": True}
            asks.append(Ask(answer.prompt, sampling))
        _warm_up(llm, asks, row["requests"], AR_WARMUP)
        found[sizes[-1]] = place | _times(serve(llm, asks, row["requests"]))
    return [found[size] for size in sizes]


def void_share(run: Run) -> float:
    """Return the share of positions computed by forwards of blocks that were done."""
    counted = sum(count.positions for count in run.counts)
    return 1 - (run.prompt_tokens + run.canvas_positions) / counted


def _warm_up(llm: "LLM", asks: list[Ask], at_once: int, tokens: int) -> None:
    # Reversed prompts have the same length and share no prefix with those that are measured.
    short = []
    for ask in asks[:at_once]:
        short.append(Ask(ask.prompt[::-1], ask.sampling | {"max_tokens": tokens}))
    serve(llm, short, at_once)


def _times(run: Run) -> dict[str, Any]:
    """Return the columns that every engine has; tokens count up to the end of an answer."""
    tokens, forwards = run.tokens, run.forwards
    whole, first = [], []
    for answer in run.answers:
        whole.append(run.stamps[answer.arrivals[-1].step] - answer.sent)
        first.append(run.stamps[answer.arrivals[0].step] - answer.sent)
    return {
        "answered": len(run.answers),
        "input_len": run.prompt_tokens / len(run.answers),
        "tokens": tokens,
        "forwards": forwards,
        "positions_per_token": (run.prompt_tokens + run.canvas_positions) / tokens,
        "steps": len(run.stamps),
        "seconds": run.seconds,
        "tokens_per_s": tokens / run.seconds,
        "forwards_per_s": forwards / run.seconds,
        "tokens_per_forward": tokens / forwards,
        "request_s": statistics.median(whole),
        "request_s_worst": max(whole),
        "first_tokens_s": statistics.median(first),
    }


def add_baselines(
    row: dict[str, Any],
    floor: Floor,
    sizes: Sizes,
    ar: dict[str, Any] | None,
    published: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """Add the floor and the baselines to a row."""
    steps = row.pop("step_sizes", None)
    if steps is None:
        middle = row["input_len"] + row["tokens"] / row["answered"] / 2
        keys = round(row["requests"] * middle)
        limit = row["steps"] * sum(floor.step_ms(sizes, row["positions"], keys))
    else:
        limit = sum(floor.steps_ms(sizes, steps))
    row["share_of_floor"] = limit / 1e3 / row["seconds"]
    if ar is not None:
        row["ar_tokens_per_s"] = ar["tokens_per_s"]
        row["speedup_vs_ar"] = row["tokens_per_s"] / ar["tokens_per_s"]
    if published is not None and row["mode"] == "latency":
        # The authors' loop ran once for each number of tokens per forward.
        speedups = row["speedup_vs_hf"] = {}
        for base in published:
            name = f"{base['tokens_per_forward']:.2f} tokens per forward"
            speedups[name] = row["tokens_per_s"] / base["tokens_per_s"]
    return row
