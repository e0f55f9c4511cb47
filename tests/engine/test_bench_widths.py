"""Modes of `diffuplug bench` that compare widths, on the CPU."""

import json
from pathlib import Path

import pytest
from bench_lines import QUICK, line_of, quiet_start
from engines import CHECKPOINTS, EngineRoom

from diffuplug_bench import gate
from diffuplug_bench.model_shapes import SHAPES
from dllm_plugin.commands import cli

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def alone(room: EngineRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet_start(room, monkeypatch)


def test_tokens_per_second_by_width(capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn acceptance: wide windows bring more tokens a forward, and a width is kept to."""
    options = [
        "--acceptance",
        "0.9:4",
        "--widths",
        "2,8,32",
        "--min-window",
        "2",
        "--vs",
        "ar",
    ]
    lengths = [
        "--input-len",
        "24",
        "--output-len",
        "32",
        "--rounds",
        "1",
        "--requests",
        "2",
    ]
    command = ["bench", "adaptive", "--shapes", "tiny", *options, *lengths, *QUICK]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    line = line_of(printed)
    rows = {row["width"]: row for row in line["rows"]}
    assert list(rows) == ["by load", 2, 8, 32] and line["benchmark"] == "adaptive"
    found = [
        json.loads(text)
        for text in printed.splitlines()
        if text.startswith('{"requests"')
    ]
    assert [row["width"] for row in found] == list(rows), "each row once it is measured"
    assert all(rows[row["width"]].items() >= row.items() for row in found)
    assert "engine start, plain vLLM" in line["seconds"]
    assert rows[2]["mean_width"] == 2 and rows[2]["tokens_per_forward"] <= 1
    assert rows[8]["mean_width"] == 8 and rows[32]["mean_width"] == 32
    found = [rows[width]["tokens_per_forward"] for width in (2, 8, 32)]
    assert found == sorted(found) and found[2] > 1.5
    assert all(row["speedup_vs_ar"] > 0 for row in rows.values())


def test_the_usual_blocks_beside_widths(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--adaptive off`, by the same drawn acceptance."""
    lengths = [
        "--input-len",
        "24",
        "--output-len",
        "64",
        "--rounds",
        "1",
        "--requests",
        "4",
    ]
    command = [
        "bench",
        "adaptive",
        "--shapes",
        "tiny",
        "--adaptive",
        "off",
        *lengths,
        *QUICK,
    ]
    assert cli.main([*command, "--acceptance", "0.9:4"]) == 0
    (row,) = line_of(capsys.readouterr().out)["rows"]
    assert row["width"] == "blocks" and row["tokens_per_s"] > 0
    assert 1.5 < row["tokens_per_forward"] < 8


def test_a_map_of_loads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every load is timed at every width, and drawn."""
    picture, grid = tmp_path / "map.png", ["--requests", "1,4", "--contexts", "16,256"]
    more = ["--widths", "2,8", "--acceptance", "0.9:4", "--picture", str(picture)]
    assert cli.main(["bench", "map", "--shapes", "tiny", *grid, *more, *QUICK]) == 0
    printed = capsys.readouterr().out
    line = line_of(printed)
    timed = {(s["requests"], s["context"], s["width"]) for s in line["steps"]}
    assert timed == {
        (n, c, w) for n in (1, 4) for c in (16, 256) for w in (1, 2, 8, 32)
    }
    assert all(step["ms"] > 0 for step in line["steps"]) and len(
        line["model_ms"]
    ) == len(timed)
    points = {(p["requests"], p["context"]): p for p in line["map"]}
    assert set(points) == {(n, c) for n in (1, 4) for c in (16, 256)}
    for point in points.values():
        assert point["adaptive"] >= point["fixed"] > 0 and point["width"] in (2, 8, 32)
        assert point["fits"]
    assert {"engine start", "steps of 1 requests", "steps of 4 requests"} <= set(
        line["seconds"]
    )
    assert picture.read_bytes().startswith(b"\x89PNG") and "by plain" in printed


def test_decode_options_reach_the_engine_of_widths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What floating canvases cannot have is refused, not left out."""
    command = [
        "bench",
        "adaptive",
        "--shapes",
        "tiny",
        "--commit-alone-from",
        "2",
        *QUICK,
    ]
    assert cli.main(command) != 0
    assert "commit_alone_from" in capsys.readouterr().err


def test_tokens_per_second_by_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    """Drafts that are accepted by drawn numbers, at a length by load and at a fixed one."""
    lengths = ["--input-len", "24", "--output-len", "32", "--rounds", "1"]
    options = ["--strategy", "introspective", "--acceptance", "2,6", "--widths", "4"]
    loads = ["--requests", "1,2", "--block-length", "4", "--vs", "ar"]
    command = ["bench", "adaptive", "--shapes", "tiny-idlm", *options, *lengths, *loads]
    assert cli.main([*command, *QUICK]) == 0
    line = line_of(capsys.readouterr().out)
    rows = line["rows"]
    assert len(rows) == 8 and line["benchmark"] == "drafts"
    fixed = {row["acceptance"]: row for row in rows if row["length"] == 4}
    # The prompt's token is sent by a first step, which may verify nothing.
    assert 6.5 < fixed[2]["mean_rows"] < 7.5
    assert fixed[2]["tokens_per_forward"] < fixed[6]["tokens_per_forward"] < 4
    for row in rows:
        reached = row["decode_tokens_per_s"] / row["ar_decode_tokens_per_s"]
        assert row["of_bound"] == pytest.approx(reached / row["bound"])
        assert row["speedup_vs_ar"] > 0 and row["break_even"] >= 1
        assert row["step_ms"] > row["gemm_ms"] > 0
    assert {row["requests"] for row in line["break_even"]} == {1, 2}
    forwards = {(step["requests"], step["rows"]): step for step in line["steps"]}
    assert set(forwards) == {(n, rows) for n in (1, 2) for rows in (1, 3, 7)}
    assert all(step["times_gemms"] > 1 for step in forwards.values())


def test_tokens_per_second_of_windows(capsys: pytest.CaptureFixture[str]) -> None:
    """As many first masks as drawn numbers let take their tokens, in a window of one length."""
    lengths = ["--input-len", "24", "--output-len", "48", "--rounds", "1"]
    options = ["--strategy", "causal_window", "--acceptance", "2,6", "--widths", "4"]
    command = ["bench", "adaptive", "--shapes", "tiny-wedlm", *options, *lengths]
    assert cli.main([*command, "--requests", "2", *QUICK]) == 0
    line = line_of(capsys.readouterr().out)
    assert [row["mean_rows"] for row in line["rows"]] == [32, 8, 32, 8]
    assert [row["length"] for row in line["rows"]] == [16, 4, 16, 4]
    six, six_of_4, two, two_of_4 = [row["tokens_per_forward"] for row in line["rows"]]
    assert 3 < six < 7 and 1.4 < two < 2.6
    # Windows of 4 take the sum of share ** k for k below 4: 3.1 and 1.9, if none is cut short.
    assert 2 < six_of_4 < 3.2 and 1.2 < two_of_4 < 2.2
    assert {row["rows"] for row in line["break_even"]} <= {2, 4, 8, 16, 32}
    floors = {step["rows"]: step["gemm_ms"] for step in line["steps"]}
    steps = [row["gemm_ms"] for row in line["rows"]]
    assert steps == pytest.approx([floors[32], floors[8]] * 2), "every step is counted"


def test_blocks_that_share_experts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule without edits of random tokens, in canvases of two blocks of the model."""
    config = json.loads((CHECKPOINTS / "tiny-llada2.2/config.json").read_text())
    special = {"mask_token_id": 260, "eos_token_id": 257}
    architecture = {"architectures": ["LLaDA22MoeModelLM"]}
    monkeypatch.setitem(SHAPES, "tiny-llada2.2", config | special | architecture)
    green = gate.Verdict(True, "LLaDA2.2 is not what a gate decodes.", {})
    monkeypatch.setattr(gate, "check", lambda *_: green)
    lengths = ["--input-len", "32", "--output-len", "64", "--rounds", "1"]
    command = ["bench", "throughput", "--shapes", "tiny-llada2.2", *lengths]
    assert cli.main([*command, "--tokens-per-forward", "4", *QUICK]) == 0
    (row,) = line_of(capsys.readouterr().out)["served"]
    assert row["canvas"] == 64 and row["tokens_per_forward"] == 4
