"""Test what ``diffuplug eval --all`` decodes and writes; engine tests cover the decoding."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

from diffuplug_bench.eval import every_policy, refreshes, report, scores
from diffuplug_bench.eval.report import Row, Way
from diffuplug_bench.word_problems.generator import eval_seeds, problem, problems_of
from dllm_plugin.config.options import Options
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.config.resolution import resolve
from dllm_plugin.decoding.families import POLICY_NAMES

STRATEGIES = tuple(every_policy.METHODS)  # of the bundled model
WAYS = [way for strategy in STRATEGIES for way in every_policy.ways(strategy)]
ROWS = [
    Row(
        *way, 1 - 0.03 * (i % 3), 64 / (way.steps or 2), 3.0 * (way.steps or 1) + i, 1.0
    )
    for i, way in enumerate(WAYS)
]


def accepted(strategy: str, policy: str, **request: Any) -> bool:
    """Whether the bundled family takes a request with this policy."""
    options = Options(strategy=strategy, block_length=64, canvas_length=128)
    resolved = resolve(options, "LLaDAModelLM", 512, mask_token_id=1)
    try:
        request_arguments(resolved, {"dllm_policy": policy} | request)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_policy_that_fits_is_decoded(strategy: str) -> None:
    decoded = {way.policy for way in WAYS if way.strategy == strategy}
    assert decoded == {p for p in POLICY_NAMES if accepted(strategy, p)}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_way_is_accepted(way: Way) -> None:
    steps = {"dllm_steps": way.steps} if way.steps else {}
    assert accepted(way.strategy, way.policy, **steps)


def test_schedules_run_from_one_token_per_step_to_few_steps() -> None:
    by_policy: dict[str, list[int | None]] = {}
    for way in every_policy.ways("block_diffusion"):
        by_policy.setdefault(way.policy, []).append(way.steps)
    assert by_policy["threshold"] == by_policy["factor"] == [None]
    assert by_policy["random"] == by_policy["entropy"] == list(every_policy.STEPS)
    assert every_policy.STEPS[0] == every_policy.BLOCK


def test_score() -> None:
    problems = problems_of(2)
    texts = [problems[0].answer, "#### 0 and more"]
    forwards = SimpleNamespace(histogram=[3, 2])
    outputs: Any = [
        SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    text=text, token_ids=[1] * 10, spec_decode_metrics=forwards
                )
            ]
        )
        for text in texts
    ]
    got = scores.score(scores.Answers(outputs, 400, 2.0), problems)
    assert got == scores.Score(0.5, 2.0, 20.0, 2.0)


def test_table_has_a_line_per_row() -> None:
    lines = report.table(ROWS).splitlines()
    assert len(lines) == len(ROWS) + 2 and len({len(line) for line in lines}) == 1
    row = " ".join(lines[2].split())
    assert row == "| d2f | threshold | - | 100.0% | 32.00 | 3.0 | 1.0 |"


def test_page_and_plot_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, with scores from the list above in place of the engines."""
    asked = []

    def decoded(strategy: str, dtype: str, limit: int, verbose: bool) -> list[Row]:
        asked.append((strategy, dtype, limit))
        return [row for row in ROWS if row.strategy == strategy]

    def saved(
        strategy: str, dtype: str, limit: int, verbose: bool
    ) -> list[refreshes.Row]:
        asked.append((strategy, dtype, limit))
        ways = refreshes.WAYS[strategy]
        return [
            refreshes.Row(strategy, way, 3, 150.0, 0.1, 0.2, 4.0, 9.0) for way in ways
        ]

    monkeypatch.setattr(every_policy, "score_strategy", decoded)
    monkeypatch.setattr(refreshes, "score_strategy", saved)
    assert every_policy.run(None, "auto", str(tmp_path)) == 0
    assert asked == [
        (name, "auto", 200) for name in (*every_policy.METHODS, *refreshes.WAYS)
    ]
    printed = capsys.readouterr().out
    records = [
        json.loads(line) for line in printed.splitlines() if line.startswith("{")
    ]
    record, of_refreshes = records
    assert of_refreshes["rows"][0]["options"] == {} and of_refreshes["problems"] == 200
    cell = "| dual_cache | full_refresh_every 8, refresh_before 32 | 150 | 10.0% | 20.0% | 4.00 |"
    assert cell in printed and cell in (tmp_path / "refreshes.md").read_text()
    assert [Row(**row) for row in record["rows"]] == ROWS and record["problems"] == 200
    text = (tmp_path / "decoding.md").read_text()
    assert report.table(ROWS) in text and report.table(ROWS) in printed
    for word in (
        "`diffuplug eval --all --limit 200",
        record["hardware"],
        str(eval_seeds(200)[-1]),
    ):
        assert word in text
    assert (tmp_path / "decoding.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("strategy", "way"),
    [(name, way) for name, ways in refreshes.WAYS.items() for way in ways],
)
def test_refreshes_that_cost_less_are_accepted(
    strategy: str, way: dict[str, int]
) -> None:
    assert accepted(
        strategy, "threshold", **{f"dllm_{name}": n for name, n in way.items()}
    )


def test_prompts_three_times_as_long_hold_the_question_three_times() -> None:
    short, long = (refreshes.repeated(2, repeats)[1] for repeats in refreshes.REPEATS)
    assert long.question == f"{short.question} {short.question} {short.question}"
    assert long.result == short.result and short == problem(eval_seeds(2)[1])


def test_the_plot_names_every_strategy_and_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A point for each row in each panel, and a name for each marker and colour."""
    figures = []
    saved = Figure.savefig

    def save(figure: Figure, path: Path) -> None:
        figures.append(figure)
        saved(figure, path)

    monkeypatch.setattr(Figure, "savefig", save)
    report.plot(ROWS, tmp_path / "plot.png")
    (figure,) = figures
    for panel in figure.axes:
        points = [tuple(point) for c in panel.collections for point in c.get_offsets()]
        assert len(points) == len(ROWS)
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    strategies = {row.strategy for row in ROWS}
    assert set(named) == strategies | {row.policy for row in ROWS}
    assert len({line.get_marker() for line in legend.get_lines()}) > len(strategies)


def test_results_go_to_the_reports_of_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report.reports_folder(None) == Path()
    (tmp_path / "benchmarks" / "reports").mkdir(parents=True)
    assert report.reports_folder(None) == Path("benchmarks/reports")


def test_without_matplotlib_nothing_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[plot\]'"):
        every_policy.run(1, "auto", str(tmp_path))
