"""Settings of `diffuplug bench`: refused, or passed to the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from diffuplug_bench import engines, gate
from diffuplug_bench.cli import build_parser
from diffuplug_bench.gate import ranks_of
from diffuplug_bench.model_shapes import SHAPES, Sizes
from diffuplug_bench.options import settings_of
from diffuplug_bench.settings import Settings
from dllm_plugin.commands import cli


def settings(*arguments: str) -> Settings:
    return settings_of(build_parser().parse_args(arguments))


@pytest.mark.parametrize(
    ("ranks", "shared_by"), [(1, 1), (2, 2), (4, 2), (6, 6), (8, 2)]
)
def test_the_gate_runs_on_ranks_that_share_the_bundled_heads(
    ranks: int, shared_by: int
) -> None:
    assert ranks_of(settings("step", "--tensor-parallel-size", str(ranks))) == shared_by


ALONE = ("--commit-alone-from", "8")
COMPILED = ("--compilation-config",)
DUMMY = ["throughput", "--shapes", "tiny", "--tokens-per-forward"]
WATCHED = [
    "watched",
    "--shapes",
    "tiny",
    "--requests",
    "4",
    "--tokens-per-forward",
    "2",
]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["step", "--shapes", "tiny", "--vs", "hf"], "--vs hf serves whole requests"),
        (["step", "--vs", "tgi"], "--vs tgi is unknown; baselines: ar, hf"),
        (
            ["latency", "--strategy", "dual"],
            "--strategy dual is unknown: use block_diffusion, d2f",
        ),
        (
            ["step", "--requests", "0,1"],
            "--requests must be whole numbers of at least 1",
        ),
        (
            ["step", "--canvas", "33", "--block-length", "16"],
            "--canvas 33 is no whole number",
        ),
        (
            ["step", "--shapes", "tiny", "--block-length", "64"],
            "--canvas 32 is no whole number",
        ),
        (
            ["step", "--threshold", "0.9"],
            "--threshold changes nothing in the mode step",
        ),
        (
            [
                "all",
                "--shapes",
                "tiny",
                "--threshold",
                "0.9",
                "--tokens-per-forward",
                "3",
            ],
            "mean nothing on dummy weights",
        ),
        (
            ["step", "--canvas", "32,64", "--max-positions", "32"],
            "leaves nothing of canvas 64",
        ),
        (
            ["step", "--block-length", "32", *ALONE],
            "--commit-alone-from 8 needs the strategy",
        ),
        (["step", "--context", "0"], "--context must be at least 1"),
        (
            ["latency", "--tensor-parallel-size", "0"],
            "--tensor-parallel-size must be at least 1",
        ),
        (["throughput", "--shapes", "tiny"], "needs --tokens-per-forward"),
        ([*DUMMY, "17"], "must lie between 1 and a block of 16"),
        ([*DUMMY, "2", "--strategy", "d2f"], "accepts by confidence"),
        ([*DUMMY, "3", "--rounds", "2"], "would be 2.91 for 1 at once"),
        ([*DUMMY, "3", "--rounds", "1"], "steps per block of 16: use --rounds 3."),
        (
            [*DUMMY, "3", "--output-len", "40"],
            "is no whole number of blocks of 16: use 48.",
        ),
        (
            [*WATCHED, "--watched", "1,5"],
            "--watched must be numbers from 0 to --requests, which is 4",
        ),
        ([*WATCHED, "--output-len", "48"], "at least four whole blocks of 16: use 64."),
        ([*WATCHED[:-1], "3"], "no whole number of steps for a block of 16: use 3.2."),
        (WATCHED[:-2], "--shapes needs --tokens-per-forward"),
        (
            ["latency", "--strategy", "dual_cache", "--approximations", "8:32"],
            "--approximations 8:32 must be full_refresh_every:refresh_before:suffix_window",
        ),
        (
            [
                "latency",
                "--strategy",
                "semi_autoregressive",
                "--approximations",
                "8::32",
            ],
            "can have a suffix_window alone",
        ),
        (
            ["latency", "--strategy", "dual_cache", "--approximations", "::"],
            "as in 8:32:32",
        ),
        (
            ["latency", "--approximations", "8::"],
            "are of full attention, not of --strategy d2f",
        ),
        (
            ["latency", "--strategy", "dual_cache", "--approximations", "0::"],
            "full_refresh_every",
        ),
        (
            [
                "step",
                "--shapes",
                "tiny",
                "--strategy",
                "semi_autoregressive",
                "--profile",
            ],
            "those of --strategy semi_autoregressive have piecewise ones: leave --profile out.",
        ),
        (["latency", "--tokens-per-forward", "2"], "is measured on a checkpoint"),
        (["latency", "--input-len", "64"], "is what the prompts have on a checkpoint"),
        (["latency", "--model", "some/model", "--vs", "hf"], "--vs hf needs --shapes"),
        (
            ["step", *COMPILED, "{}", "--enforce-eager"],
            "--compilation-config says how to compile",
        ),
        (["step", *COMPILED, '{"x": 1}'], "--compilation-config: x: Unexpected"),
        (
            ["step", *COMPILED, '{"cudagraph_mode": "a"}'],
            "--compilation-config: 'A' is unknown",
        ),
        (
            ["step", *COMPILED, '{"compile_sizes": 3}'],
            "--compilation-config: compile_sizes: Input",
        ),
    ],
)
def test_what_means_nothing_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "'{' is no JSON: "), ("3", "'3' is no JSON object")]
)
def test_a_compilation_config_is_a_json_object(
    text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        settings("step", "--compilation-config", text)
    assert ended.value.code == 2
    assert f"argument --compilation-config: {sentence}" in capsys.readouterr().err


def test_the_gate_compiles_for_its_own_numbers_of_tokens() -> None:
    sizes = '"compile_sizes": [4096, "cudagraph_capture_sizes"], "cudagraph_capture_sizes": [4096]'
    given = settings(
        "step", *COMPILED, f'{{"mode": 3, "max_cudagraph_capture_size": 9, {sizes}}}'
    )
    assert gate._compilation(given) == {
        "mode": 3,
        "compile_sizes": ["cudagraph_capture_sizes"],
    }
    assert gate._compilation(settings("step")) == {}


def test_switches_reach_the_engine() -> None:
    given = settings(
        "step", "--compile-step", "--vocab-parallel", "--tensor-parallel-size", "2"
    )
    assert given.switches == {"compile_step": True, "vocab_parallel": True}
    assert settings("step", "--no-compile-step").switches == {"compile_step": False}
    assert given.switches.items() <= given.dllm(128).items()
    assert not settings("step").switches
    # Each rank multiplies its share of the weights.
    whole, half = Sizes.of(SHAPES["dream-7b"]), Sizes.of(SHAPES["dream-7b"]).per_rank(2)
    assert 2 * half.kv_bytes(3, 2) == whole.kv_bytes(3, 2)
    outputs = [
        sum(n for n, _ in sizes.mlp_gemms(sizes.inner)[:1]) for sizes in (whole, half)
    ]
    assert outputs[0] == 2 * outputs[1] and whole.vocab == 2 * half.vocab


def test_prompts_enter_as_fast_as_those_of_plain_vllm() -> None:
    """A budget of tokens that many canvases need is never below vLLM's own default."""
    model = engines.Model("a-model", {}, is_real=False)
    defaults, _ = EngineArgs.get_batch_defaults(1)
    default = defaults[UsageContext.LLM_CLASS]
    for requests, budget in ((64, None), (65, default), (8192, 128 + 8192 * 32)):
        asked = (
            "--shapes",
            "tiny",
            "--requests",
            str(requests),
            "--tokens-per-forward",
            "2",
        )
        given = settings("throughput", *asked)
        options = engines.options_of_ours(given, model, 32, 128)
        assert options.get("max_num_batched_tokens") == budget


def test_positions_of_a_step_are_those_that_are_computed() -> None:
    given = settings(
        "step", "--shapes", "tiny", "--canvas", "64", "--requests", "4,8", *ALONE
    )
    assert given.dllm(64)["commit_alone_from"] == 8
    assert [given.positions_of_step(64, n, 8) for n in (4, 8)] == [4 * 64, 8 * 32]
    assert given.positions_of_step(64, 8, 0) == 8 * 64
    assert given.computes_next_block(64) and not settings("step").computes_next_block(
        64
    )
    mixed = settings(
        "step", "--shapes", "tiny", "--canvas", "16,32", "--block-length", "16"
    )
    assert [mixed.computes_next_block(canvas) for canvas in mixed.canvas] == [
        False,
        True,
    ]


def test_strategy_follows_what_is_measured() -> None:
    assert settings("step").strategy == "d2f"
    assert settings("step", "--shapes", "tiny").strategy == "block_diffusion"
    assert settings("step", "--shapes", "tiny").dllm(128) == {
        "strategy": "block_diffusion",
        "policy": "low_confidence",
        "canvas_length": 128,
        "block_length": 64,
    }


def test_grid_leaves_large_points_out() -> None:
    grid = ("--requests", "1,16,64", "--canvas", "32,128", "--max-positions", "2048")
    chosen = settings("step", "--shapes", "tiny", *grid)
    assert {canvas: chosen.grid_requests(canvas) for canvas in chosen.canvas} == {
        32: (1, 16, 64),
        128: (1, 16),
    }


def test_only_what_is_served_has_to_be_met() -> None:
    """Two rounds of 16 requests are enough requests; a request alone is not."""
    arguments = (*DUMMY[1:], "3", "--rounds", "2", "--requests", "16")
    assert settings("throughput", *arguments).served_requests(32) == (16,)
    with pytest.raises(ValueError, match="for 1 at once"):
        settings("all", *arguments)


def test_target_script_asks_for_what_exists(tmp_path: Path) -> None:
    """Its commands, caught in place of Python, are accepted; a failing one stops no other."""
    caught = tmp_path / "python3"
    script = (
        'print(json.dumps({"line": sys.argv[4:]})); sys.exit(sys.argv[4] == "latency")'
    )
    caught.write_text(f"#!{sys.executable}\nimport json, sys\n{script}\n")
    caught.chmod(0o755)
    script = f"benchmarks/targets.sh {tmp_path}/out; benchmarks/targets.sh {tmp_path}/out short"
    command = ["bash", "-c", f"cd {ROOT}; {script}"]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    assert "FAILED with status 1" in done.stdout
    lines = (tmp_path / "out" / "lines.jsonl").read_text().splitlines()
    asked = [settings(*json.loads(line)["line"]) for line in lines]
    assert [s.mode for s in asked] == ["all"] * 2 + ["step"] * 3 + ["latency"] + [
        "step"
    ] * 6
    assert [s.shapes for s in asked[:5]] == ["llada-8b", "dream-7b"] * 2 + ["llada-8b"]
    assert all(s.grid_requests(canvas) for s in asked for canvas in s.canvas)
