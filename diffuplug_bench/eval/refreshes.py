"""Run ``diffuplug eval --refreshes``: what refreshes that cost less save, and what they change.

The same problems with and without each option, with prompts as they are and three times as long.
The bundled model was trained on one question per prompt, so longer prompts have texts to compare
and hardly a right answer.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from diffuplug_bench.eval.report import (
    ending,
    record_of,
    reports_folder,
    software,
)
from diffuplug_bench.eval.scores import Answers, answers, progress_bar, score, start
from diffuplug_bench.word_problems.generator import Problem, problems_of
from dllm_plugin.commands.offline import stop_engine
from dllm_plugin.decoding.families import DUAL_CACHE, SEMI_AUTOREGRESSIVE

LIMIT = 60
BLOCK, CANVAS = 16, 128  # answers have up to six blocks
REPEATS = (1, 3)  # how often a prompt holds its question
EXACT: dict[str, int] = {}
WINDOW = {"suffix_window": 32}
SELDOM = {"full_refresh_every": 8}
NEAR = SELDOM | {"refresh_before": 32}
WAYS = {
    DUAL_CACHE: (EXACT, WINDOW, SELDOM, NEAR, NEAR | WINDOW),
    SEMI_AUTOREGRESSIVE: (EXACT, WINDOW),
}
READING = """\
*Positions per token* are all that were computed, prompts too, over tokens up to and including the
end of the answer. *Same text* is the share of answers that equal those of the strategy without an
option, token for token. Prompts three times as long hold the same question three times. The bundled
model was trained on one question per prompt and answers most of them wrongly: there
*same text* says how much an option changes, and accuracy says nothing."""


class Row(NamedTuple):
    """Score a strategy with some options on prompts of one length."""

    strategy: str
    options: dict[str, int]
    questions_per_prompt: int
    prompt_tokens: float  # mean
    accuracy: float
    same_text: float  # share of answers
    tokens_per_forward: float
    positions_per_token: float


def repeated(limit: int, repeats: int) -> list[Problem]:
    """Return unseen problems, each question asked so often in one prompt."""
    found = problems_of(limit)
    return [replace(one, question=" ".join([one.question] * repeats)) for one in found]


def run(
    limit: int | None, dtype: str, output: str | None, verbose: bool = False
) -> int:
    """Decode `limit` problems in every way; write the page, print table and JSON line."""
    folder, limit = reports_folder(output), limit or LIMIT
    rows = []
    for strategy in WAYS:
        rows += score_strategy(strategy, dtype, limit, verbose)
    lengths = {"block_length": BLOCK, "canvas_length": CANVAS}
    record = record_of("eval_refreshes", limit, dtype, rows, **lengths)
    command = f"diffuplug eval --refreshes --limit {limit} --dtype {dtype}"
    (folder / "refreshes.md").write_text(page(rows, record, command), encoding="utf-8")
    print(table(rows))
    print(f"\nwritten: {folder / 'refreshes.md'}")
    print(json.dumps(record))
    return 0


def score_strategy(
    strategy: str, dtype: str, limit: int, verbose: bool = False
) -> list[Row]:
    """Score all options of one strategy, which are those of requests, on one engine."""
    from dllm_plugin.commands.phases import screen

    dllm = {"block_length": BLOCK, "canvas_length": CANVAS, "strategy": strategy}
    rows: list[Row] = []
    with screen(verbose) as shown:
        llm = start(dllm, dtype, shown.log)
        for repeats in REPEATS:
            problems, exact = repeated(limit, repeats), list[list[int]]()
            for options in WAYS[strategy]:
                extra = {f"dllm_{name}": value for name, value in options.items()}
                bar = progress_bar(
                    shown, f"{strategy}, {named(options)}, prompt x {repeats}"
                )
                found = answers(llm, problems, CANVAS, bar, extra)
                texts = [list(one.outputs[0].token_ids) for one in found.outputs]
                exact = exact or texts
                row = _row(strategy, options, repeats, found, problems)
                same = sum(a == b for a, b in zip(texts, exact, strict=True))
                rows.append(row._replace(same_text=same / limit))
        stop_engine(llm)
    return rows


def _row(
    strategy: str,
    options: dict[str, int],
    repeats: int,
    found: Answers,
    problems: Sequence[Problem],
) -> Row:
    prompt_tokens = 0
    for output in found.outputs:
        prompt_tokens += len(output.prompt_token_ids or ())
    scored = score(found, problems)
    return Row(
        strategy=strategy,
        options=options,
        questions_per_prompt=repeats,
        prompt_tokens=prompt_tokens / len(problems),
        accuracy=scored.accuracy,
        same_text=1.0,
        tokens_per_forward=scored.tokens_per_forward,
        positions_per_token=scored.positions_per_token,
    )


def named(options: dict[str, int]) -> str:
    """Return options as a cell of the table."""
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "exact"


def table(rows: Sequence[Row]) -> str:
    """Format the scores as a Markdown table."""
    lines = [
        "| strategy | options | prompt tokens | accuracy | same text | tokens per forward "
        "| positions per token |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row.strategy} | {named(row.options)} | {row.prompt_tokens:.0f} "
            f"| {row.accuracy:.1%} | {row.same_text:.1%} | {row.tokens_per_forward:.2f} "
            f"| {row.positions_per_token:.1f} |"
        )
    return "\n".join(lines)


def page(rows: Sequence[Row], record: dict[str, Any], command: str) -> str:
    """Format the report: what was run, the table and the JSON line."""
    versions = software(record, "diffuplug", "vllm", "torch")
    return (
        "# Refreshes that cost less, on the bundled model\n\n"
        f"`{command}`: {record['problems']} problems from seed {record['first_seed']} on, none of "
        f"which it was trained on; greedy, `{DUAL_CACHE}` with threshold 0.9 and "
        f"`{SEMI_AUTOREGRESSIVE}` with one token per step, blocks of {BLOCK}, "
        f"canvases of {CANVAS}; {record['hardware']}, {versions}.\n\n"
        f"{table(rows)}\n\n{READING}\n\n{ending(record)}"
    )
