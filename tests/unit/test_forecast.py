"""What commands say of widths without decoding: questions, schedules, loads and forecasts."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from refusals import resolved

from diffuplug_bench.eval.schedules import Question, read_questions, read_widths
from dllm_plugin.commands import cli
from dllm_plugin.commands.forecast import Load, forecast, read_load, with_widths
from dllm_plugin.config.adaptive import is_published
from dllm_plugin.config.carriers import StepWidth
from dllm_plugin.decoding.step_costs import Costs, MeasuredCosts
from dllm_plugin.engine.metrics import observe_width, width_metrics

FLOATING = resolved(strategy="d2f", adaptive="throughput", min_window=2)


def arguments(**given: Any) -> argparse.Namespace:
    names = ("requests", "context", "acceptance", "step_ms")
    windows = ("adaptive", "min_window", "max_window", "canvas_length")
    return argparse.Namespace(**dict.fromkeys(names + windows) | given)


def test_few_requests_get_wide_windows_and_many_narrow_ones() -> None:
    found = [
        forecast(FLOATING, Load(n, 512, 0.9, 2.5), Costs()) for n in (1, 16, 64, 256)
    ]
    widths = [one.width for one in found]
    assert widths == sorted(widths, reverse=True) and widths[0] > 16 and widths[-1] <= 4
    assert all(one.rate >= one.widest for one in found)


def test_long_contexts_get_wider_windows() -> None:
    """They are read once for all that a forward commits."""
    costs = Costs(per_key=1e-5, reads=2.0)
    short, long = (
        forecast(FLOATING, Load(64, n, 0.9, 2.5), costs) for n in (512, 32_768)
    )
    assert long.width > short.width and long.rate < short.rate


def test_loads() -> None:
    assert read_load(arguments()) is None
    assert read_load(arguments(requests=8)) == Load(8, 1024, 0.9, 2.5)
    asked = arguments(requests=8, context=64, acceptance="0.5:1.5", step_ms=4.6)
    assert read_load(asked) == Load(8, 64, 0.5, 1.5, 4.6)
    for name, value in (("context", 8), ("acceptance", "1:1"), ("step_ms", 2.0)):
        with pytest.raises(ValueError, match="needs --requests"):
            read_load(arguments(**{name: value}))
    for wrong in ("0.9", "1.5:2", "0.9:0", "x:y", "0.5:nan"):
        with pytest.raises(ValueError, match="--acceptance must be"):
            read_load(arguments(requests=1, acceptance=wrong))
    with pytest.raises(ValueError, match="--step-ms must be"):
        read_load(arguments(requests=1, step_ms=-1.0))


def test_options_of_widths() -> None:
    """A window names `adaptive` where a load is asked about; what is not given is not there."""
    dllm = {"strategy": "d2f"}
    assert (
        with_widths(arguments(requests=8), dllm)
        == with_widths(arguments(), dllm)
        == dllm
    )
    assert with_widths(arguments(min_window=2), dllm) == dllm | {"min_window": 2}
    windows = {"min_window": 2, "max_window": 16}
    assert with_widths(arguments(requests=8, **windows), dllm) == dllm | windows | {
        "adaptive": "throughput"
    }
    given = {"adaptive": "balanced", "max_window": 16, "canvas_length": 64}
    assert with_widths(arguments(requests=8, **given), dllm) == dllm | given
    with pytest.raises(ValueError, match="--adaptive off has none"):
        with_widths(arguments(requests=8, adaptive="off"), dllm)
    with pytest.raises(ValueError, match="max_window must be a whole number"):
        with_widths(arguments(max_window=-1), dllm)


def test_balanced_is_wider() -> None:
    """By nine tenths of the rate."""
    balanced = resolved(strategy="d2f", adaptive="balanced", min_window=2)
    load = Load(64, 512, 0.9, 2.5)
    one, other = (forecast(config, load, Costs()) for config in (FLOATING, balanced))
    assert one.width < other.width and 0.9 * one.rate <= other.rate <= one.rate


def test_doctor_tells_widths(
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the graphs of each, once, whoever asked for them."""
    graphs = {2: [1, 64], 16: [1, 2, 4]}
    monkeypatch.setattr(
        "dllm_plugin.commands.doctor.captured_graphs", lambda *given: graphs
    )
    doctor = ["doctor", str(checkpoints / "tiny-sdar"), "--requests", "64"]
    for asked, width in (
        ([], "of 4 to 4, with adaptive"),
        (["--min-window=2"], "of 2 to 4, with adaptive"),
        (
            ["--adaptive=balanced", "--min-window=2"],
            "of 2 to 4, with adaptive 'balanced'",
        ),
    ):
        assert cli.main([*doctor, *asked]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [
            line for line in lines if line.startswith("width:") and line.endswith(width)
        ]
        found = [
            line.split(":")[1].strip() for line in lines if line.startswith("  width ")
        ]
        assert found == [
            "for up to 64 requests, 2 graphs",
            "for up to 4 requests, 3 graphs",
        ]
    assert cli.main([*doctor[:2], "--min-window=2"]) == 1
    assert "min_window 2 has no effect with adaptive 'off'" in capsys.readouterr().out
    assert cli.main([*doctor[:2], "--adaptive=throughput", "--canvas-length=2"]) == 1


def test_doctor_tells_graphs_of_full_attention(
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for graphs in ({32: [1, 2, 8]}, {}):
        monkeypatch.setattr(
            "dllm_plugin.commands.doctor.captured_graphs", lambda *_, g=graphs: g
        )
        assert cli.main(["doctor", str(checkpoints / "tiny-llada")]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        for line in (
            "forwards of 32: for up to 8 requests, 3 graphs",
            "refreshes: piecewise",
        ):
            assert (line in printed) is bool(graphs)


def test_widths() -> None:
    assert read_widths("2,32,8,8") == [32, 8, 2]
    for wrong in ("", "8,", "0", "-1", "8.5", "wide"):
        with pytest.raises(ValueError, match="--schedule must be widths"):
            read_widths(wrong)


def test_questions(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [
        {"question": f"{n}?", "answer": f"{n} and so #### 1,00{n}"} for n in range(4)
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    found = read_questions(str(file), 3)
    assert len(found) == 3 and found[0].question == "0?"
    assert found[2].is_right("2 plus 1000 is 1002.") and not found[2].is_right(
        "1002 or 1003"
    )
    assert Question("?", "Paris").is_right("It is paris, I think.")
    assert not Question("?", "Paris").is_right("It is Rome.")
    assert len(read_questions(None, 2)) == 2
    for wrong, sentence in (
        ("", "holds no question"),
        ("[1]\n", "line 1"),
        ("{\n", "line 1"),
    ):
        file.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=sentence):
            read_questions(str(file), None)


def test_what_was_published() -> None:
    assert is_published("GSAI-ML/LLaDA-8B-Base", None, 2)
    assert not is_published("GSAI-ML/LLaDA-8B-Base", "adapter", 8)
    assert is_published("JetLM/SDAR-8B-Chat", None, 8)
    assert not is_published("JetLM/SDAR-8B-Chat", None, 4)
    assert not is_published("Dream-org/Dream-v0-Instruct-7B", None, 8)


def test_what_a_step_tells() -> None:
    """Integers alone: vLLM carries no others between its processes."""
    labels: list[object] = ["forecast", "0"]
    observe_width(StepWidth(8, 1, 0.97, 2.5, 1.25), labels)
    _, _, gauges = width_metrics()
    assert gauges["step_cost_scale"].labels(*labels)._value.get() == 1.25


def test_a_forecast_by_measured_steps() -> None:
    """Tokens of all requests in a ms, and said to be measured."""
    measured = MeasuredCosts((8, 1024), (4.0, 24.0), 0.0, 1.0, {})
    found = forecast(FLOATING, Load(64, 512, 0.9, 2.5), measured)
    assert (
        found.measured
        and not forecast(FLOATING, Load(64, 512, 0.9, 2.5), Costs()).measured
    )
    assert found.rate == pytest.approx(
        64 * found.tokens / measured.step(64, found.width, 0)
    )
