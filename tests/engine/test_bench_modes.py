"""Every mode of `diffuplug bench` on the CPU: tiny shapes, the bundled model, and a red gate."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from bench_lines import QUICK, line_of, quiet_start
from dummies import WHOSE, without_checkpoint, worker_of
from engines import EngineRoom
from forked import PYTHON
from safetensors.torch import load_file, save_file

from diffuplug_bench import command, engines
from diffuplug_bench.cli import build_parser
from diffuplug_bench.options import settings_of
from diffuplug_bench.serving import requests
from diffuplug_bench.step.counts import Count
from diffuplug_bench.step.floor import StepSize
from diffuplug_bench.step.sizes import Forward, sizes_of
from dllm_plugin import default_model
from dllm_plugin.commands import cli
from dllm_plugin.commands.offline import stop_engine

pytestmark = pytest.mark.slow
SHAPES = [
    "--shapes",
    "tiny",
    "--requests",
    "1,3",
    "--tokens-per-forward",
    "3",
    "--vs",
    "ar,hf",
]
ALONE = ("--commit-alone-from", "1")
LENGTHS = [
    "--context",
    "128",
    "--input-len",
    "32",
    "--output-len",
    "48",
    "--rounds",
    "3",
]


@pytest.fixture(autouse=True)
def alone(room: EngineRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet_start(room, monkeypatch)


def test_all_modes_and_baselines_on_dummy_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "all", *SHAPES, *LENGTHS, *QUICK]) == 0
    printed = capsys.readouterr().out
    line = line_of(printed)
    assert line["gate"] == "green" and line["gates"][0]["tokens"] > 200
    # The gate decodes in both ways that an engine has: whole canvases, and a block of each.
    few, many = line["gates"][0]["positions_per_forward"]
    assert few == 32 and 16 <= many < 20
    assert line["seed"] == 3 and line["command"].startswith(
        "diffuplug bench all --shapes tiny"
    )
    assert line["ar"]["engine"]["architecture"] == "LlamaForCausalLM"
    floor = {int(count): ms for count, ms in line["floor"]["gemm_ms"].items()}

    parts = ["gate, canvas 32", "floor", "engine start, canvas 32", "steps, canvas 32"]
    parts += ["requests, canvas 32", "engine start, plain vLLM", "plain vLLM"]
    parts += ["the model's own loop"]
    assert list(line["seconds"]) == parts
    # What was found is said before the next part begins.
    assert (
        printed.index("share_of_floor")
        < printed.index("answered")
        < printed.index(parts[-2])
    )

    assert [row["requests"] for row in line["step"]] == [1, 3]
    for row in line["step"]:
        assert row["canvas"] == 32 and row["steps"] >= 40
        assert row["gemm_ms"] == floor[32 * row["requests"]]
        assert row["floor_ms"] == pytest.approx(row["gemm_ms"] + row["kv_ms"])
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["step_ms"])
        assert row["forwards_per_s"] == pytest.approx(
            1e3 * row["requests"] / row["step_ms"]
        )
        # Blocks of 16 in eight steps, 512 columns of bfloat16.
        assert row["tokens_per_forward"] == 2 and row["positions_per_token"] == 32 / 2
        assert row["logits_mb"] == 32 * row["requests"] * 512 * 2 / 1e6
        assert "temporary_mb" not in row, "there is no allocator to ask on a CPU"
        assert row["times_ar_step"] == pytest.approx(row["step_ms"] / row["ar_step_ms"])
        assert abs(row["context"] - 128) <= 16

    served = [(row["mode"], row["requests"]) for row in line["served"]]
    assert served == [("throughput", 1), ("throughput", 3), ("latency", 1)]
    for row, other in zip(line["served"], line["ar"]["served"], strict=True):
        answered = 3 * row["requests"]
        assert row["answered"] == other["answered"] == answered
        assert row["tokens"] == other["tokens"] == 48 * answered
        assert row["input_len"] == other["input_len"] == 32
        # Three blocks of 16 in 5, 5 and 6 steps each.
        assert row["forwards"] == answered * 16 and row["tokens_per_forward"] == 3
        assert row["positions_per_token"] == (32 + 16 * 32) / 48
        assert other["forwards"] == other["tokens"]
        assert row["speedup_vs_ar"] == pytest.approx(
            row["tokens_per_s"] / other["tokens_per_s"]
        )
    one, three = line["hf"]
    assert (one["forwards"], three["forwards"]) == (48, 16)
    assert list(line["served"][2]["speedup_vs_hf"].values()) == pytest.approx(
        [
            line["served"][2]["tokens_per_s"] / base["tokens_per_s"]
            for base in (one, three)
        ]
    )


def test_the_compilation_config_reaches_gate_and_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a CPU vLLM traces the model where nothing is said: plain vLLM is not compiled then."""
    given = ["--compilation-config", '{"mode": 0, "compile_sizes": [32]}']
    given = ["--vs", "ar", "--dtype", "float32", *given]
    assert (
        cli.main(["bench", "step", "--shapes", "tiny", "--context", "64", *given]) == 0
    )
    printed = capsys.readouterr().out
    line = line_of(printed)
    assert "it and our engine: float32, not compiled" in printed
    assert line["engines"][0]["dtype"] == line["ar"]["engine"]["dtype"] == "float32"
    assert line["ar"]["engine"]["compilation_mode"] == "NONE"
    assert line["floor"]["kv_item_bytes"] == 4
    ours = [line["gates"][0]["engine"], *line["engines"]]
    assert [engine["compilation_mode"] for engine in ours] == ["NONE", "NONE"]
    assert [engine["compile_sizes"] for engine in ours] == [[], []], (
        "nothing is compiled"
    )
    assert shlex.split(line["command"])[-6:] == given


def test_auto_is_the_dtype_of_our_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU without bfloat16 units too; no engine is started."""
    arguments = ["throughput", "--dtype", "auto", "--vs", "ar"]
    settings = settings_of(build_parser().parse_args(arguments))
    model = engines.find_model(settings, tmp_path)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert engines.with_dtype(settings, model, 256).dtype == "float32"


@pytest.mark.parametrize("whose", WHOSE)
def test_engines_without_a_checkpoint_have_random_weights(
    whose: str, tmp_path: Path
) -> None:
    """Those that vLLM has not packed for the CPU; tests/gpu has the others."""
    engine = without_checkpoint(whose, tmp_path)
    found = dict(worker_of(engine).get_model().named_parameters())
    stop_engine(engine)
    assert found["model.embed_tokens.weight"].float().std().item() == pytest.approx(
        0.02, rel=0.02
    )
    norms = [values for name, values in found.items() if "norm" in name]
    assert len(norms) >= 5 and all((values == 1).all() for values in norms)


@pytest.mark.parametrize(
    ("canvas", "more", "layout"),
    [("16", ("--kv-cache-layout", "distinct"), "distinct"), ("32", ALONE, "unified")],
    ids=["canvas", "fed"],
)
def test_one_block_at_a_time(
    canvas: str, more: tuple[str, ...], layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each block takes a step more, which stores it."""
    arguments = [
        "--shapes",
        "tiny",
        "--canvas",
        canvas,
        "--block-length",
        "16",
        "--context",
        "64",
    ]
    output = ["--tokens-per-forward", "4", "--input-len", "32", "--output-len", "48"]
    assert (
        cli.main(["bench", "all", *arguments, *output, "--rounds", "1", *more, *QUICK])
        == 0
    )
    line = line_of(capsys.readouterr().out)
    assert line["gate"] == "green" and line["gates"][0]["block_length"] == 16
    ours = [line["gates"][0]["engine"], *line["engines"]]
    assert [engine["kv_cache_layout"] for engine in ours] == [layout] * 2
    (step,) = line["step"]
    assert step["positions"] == 16 and step["steps"] >= 40
    for row in line["served"]:
        # Three blocks in four steps each, and two that are stored.
        assert (
            row["forwards"] == 14 and row["positions_per_token"] == (32 + 14 * 16) / 48
        )


@pytest.mark.usefixtures("template")
def test_a_watched_stream_over_http(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row without watched requests is measured unasked, and frames change no token."""
    monkeypatch.setattr(sys, "executable", PYTHON)
    arguments = [
        "--shapes",
        "tiny",
        "--requests",
        "3",
        "--watched",
        "1,3",
        "--rounds",
        "1",
    ]
    arguments += [
        "--tokens-per-forward",
        "2",
        "--input-len",
        "32",
        "--output-len",
        "128",
    ]
    assert cli.main(["bench", "watched", *arguments, *QUICK]) == 0
    printed = capsys.readouterr().out
    line = line_of(printed)
    assert line["benchmark"] == "watched" and "share_of_unwatched" in printed
    none, one, all_of_them = line["watched"]
    assert [row["watched"] for row in line["watched"]] == [0, 1, 3]
    for row in line["watched"]:
        assert row["requests"] == 3 and row["canvas"] == 32 and row["tokens"] == 3 * 128
        assert row["forwards_per_request"] == 64, "8 blocks of eight forwards"
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        # A reader that gets no core meanwhile finds all texts at the end.
        assert row["step_ms"] is None or 0 < row["step_ms"] < 1e3 * row["seconds"] / 10
    assert none["share_of_unwatched"] == 1 and "frames_per_request" not in none
    for row in (one, all_of_them):
        assert 8 < row["frames_per_request"] <= 65
    assert (
        all_of_them["kb_per_request"] > one["kb_per_request"] > none["kb_per_request"]
    )


REFRESHES = (
    "--full-refresh-every",
    "2",
    "--refresh-before",
    "16",
    "--suffix-window",
    "16",
)
CHEAPER = (64 + 48 + 96 + 32) + 4 * 3 * 16  # positions that these compute
FULL = ["--canvas", "64", "--block-length", "16", "--rounds", "1", "--output-len", "64"]


@pytest.mark.parametrize(
    ("strategy", "more", "computed"),
    [
        # Four blocks of four forwards each behind a prompt of 32.
        ("dual_cache", (), 4 * (32 + 64 + 3 * 16)),
        ("dual_cache", REFRESHES, CHEAPER),
        ("dual_cache", ("--approximations", "2:16:16"), 4 * (32 + 64 + 3 * 16)),
        ("prefix_cache", (), 4 * (32 + 64) + 3 * (64 + 48 + 32 + 16)),
        ("semi_autoregressive", (), 16 * (32 + 64)),
    ],
    ids=["dual", "refreshes", "beside", "prefix", "semi"],
)
def test_full_attention(
    strategy: str,
    more: tuple[str, ...],
    computed: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forwards of several sizes: the floor is that of what each step computed."""
    counted = []

    def noted(counts: list[Count], forwards: list[Forward]) -> list[StepSize]:
        counted.append(sum(count.positions for count in counts))
        assert sum(count.forwards for count in counts) == len(forwards)
        return sizes_of(counts, forwards)

    monkeypatch.setattr(requests, "sizes_of", noted)
    arguments = [
        "--strategy",
        strategy,
        "--shapes",
        "tiny",
        "--requests",
        "2",
        "--context",
        "64",
    ]
    arguments += ["--tokens-per-forward", "4", "--input-len", "32", *FULL, *more]
    assert cli.main(["bench", "all", *arguments, *QUICK]) == 0
    line = line_of(capsys.readouterr().out)
    assert line["gate"] == "green" and line["gates"][0]["strategy"] == strategy
    assert line["floor"]["gemm_ms"] == {} and line["floor"]["layers_ms"]
    (step,) = line["step"]
    assert step["steps"] >= 40 and 2 * 16 <= step["positions"] <= 2 * (64 + 2 * 64)
    assert step["floor_ms"] == pytest.approx(step["gemm_ms"] + step["kv_ms"])
    assert step["logits_mb"] == 2 * 16 * 512 * 2 / 1e6
    for row, positions in zip(line["served"], counted, strict=True):
        expected = CHEAPER if "approximation" in row else computed
        assert positions == row["answered"] * expected
        assert row["positions_per_token"] == expected / 64 and row["share_of_floor"] > 0
        assert row["void_share"] == 0  # on a schedule, and CPUs launch nothing ahead
    kinds = ["2:16:16"] * ("--approximations" in more)
    assert [row.get("approximation") for row in line["served"]] == [
        kind for kind in [None, *kinds] for _ in ("throughput", "latency")
    ]
    assert line["gates"][0]["requests"] == 4 * (1 + len(kinds))


def test_bundled_model_has_measured_acceptance(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["throughput", "--requests", "4", "--rounds", "1", "--output-len", "96"]
    assert cli.main(["bench", *arguments, *QUICK]) == 0
    line = line_of(capsys.readouterr().out)
    (row,) = line["served"]
    assert line["gates"][0]["strategy"] == "d2f" and "step" not in line
    assert len(line["gates"][0]["positions_per_forward"]) == 1
    assert row["accuracy"] == 1 and row["tokens_per_forward"] > 3
    assert row["tokens"] < 4 * 96, (
        "answers end before the limit, and nothing behind them counts"
    )
    # What was not measured beside a baseline is no speed-up.
    assert not [name for name in row if "speedup" in name or "times_ar" in name]


def test_a_red_gate_stops_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plain loop reads a copy of the weights with one damaged matrix."""
    folder = tmp_path / "reference"
    shutil.copytree(default_model.path(), folder, ignore=lambda *_: ["__pycache__"])
    weights = load_file(folder / "model.safetensors")
    name = "model.transformer.blocks.3.ff_out.weight"
    weights[name] = torch.roll(weights[name], 1, 0)
    save_file(weights, folder / "model.safetensors")
    arguments = [
        "latency",
        "--strategy",
        "block_diffusion",
        "--vs",
        "ar",
        *QUICK,
    ]
    settings = settings_of(build_parser().parse_args(arguments))
    assert command.run(settings, arguments, reference=folder) == 1
    printed = capsys.readouterr().out
    line = line_of(printed)
    assert line["gate"] == "red" and "differ from its plain loop" in line["problem"]
    assert line["problem"] in printed.splitlines()[-2]
    assert not {"served", "step", "ar", "hf", "floor", "profile"} & set(line)
    assert "speedup" not in printed and "times_ar" not in printed
