"""Run ``diffuplug eval --all``: score the bundled model under every strategy and policy."""

import json
from typing import Any

from diffuplug_bench.eval import refreshes
from diffuplug_bench.eval.report import (
    Row,
    Way,
    check_matplotlib,
    page,
    plot,
    record_of,
    reports_folder,
    table,
)
from diffuplug_bench.eval.scores import answers, progress_bar, score, start
from diffuplug_bench.word_problems.generator import problems_of
from dllm_plugin import default_model
from dllm_plugin.commands.offline import stop_engine
from dllm_plugin.decoding.families import LLADA
from dllm_plugin.decoding.methods import methods_of

LIMIT = 200
METHODS = methods_of(LLADA)  # of the bundled model
# Answers have up to 82 tokens: two blocks. With blocks of 32, all policies were always right.
BLOCK, CANVAS = 64, 128
STEPS = (64, 8, 2)  # per block, for policies that follow a schedule


def ways(strategy: str) -> list[Way]:
    """List every policy of a strategy; scheduled ones once for each number in `STEPS`."""
    found = []
    method = METHODS[strategy]
    for policy, reading in method.policies.items():
        scheduled = "steps" in reading.reads
        for steps in STEPS if scheduled else (None,):
            found.append(Way(strategy, policy, steps))
    return found


def run(
    limit: int | None, dtype: str, output: str | None, verbose: bool = False
) -> int:
    """Decode `limit` problems in every way; write pages and plot, print tables and JSON lines."""
    check_matplotlib("eval --all draws a plot")
    folder = reports_folder(output)
    limit = limit or LIMIT
    rows = []
    for strategy in METHODS:
        rows += score_strategy(strategy, dtype, limit, verbose)
    lengths = {"block_length": BLOCK, "max_tokens": CANVAS}
    record = record_of("eval_all", limit, dtype, rows, **lengths)
    command = f"diffuplug eval --all --limit {limit} --dtype {dtype}"
    (folder / "decoding.md").write_text(page(rows, record, command), encoding="utf-8")
    plot(rows, folder / "decoding.png")
    print(table(rows))
    print(f"\nwritten: {folder / 'decoding.md'}, {folder / 'decoding.png'}")
    print(json.dumps(record))
    return refreshes.run(limit, dtype, output, verbose)


def score_strategy(
    strategy: str, dtype: str, limit: int, verbose: bool = False
) -> list[Row]:
    """Score all ways of one strategy on one engine."""
    from dllm_plugin.commands.phases import screen

    problems = problems_of(limit)
    dllm: dict[str, Any] = {"strategy": strategy}
    dllm |= {"block_length": BLOCK, "canvas_length": CANVAS}
    method = METHODS[strategy]
    if method.uses_adapter:
        dllm["lora_path"] = default_model.adapter_path()
    if method.next_block:
        dllm["commit_alone_from"] = 0  # else positions depend on the device
    rows = []
    with screen(verbose) as shown:
        llm = start(dllm, dtype, shown.log)
        for way in ways(strategy):
            extra_args: dict[str, Any] = {"dllm_policy": way.policy}
            if way.steps:
                extra_args["dllm_steps"] = way.steps
            bar = progress_bar(shown, way.name)
            found = answers(llm, problems, CANVAS, bar, extra_args)
            rows.append(Row(*way, *score(found, problems)))
        stop_engine(llm)
    return rows
