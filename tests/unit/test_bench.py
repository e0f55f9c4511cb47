"""Test the measuring modes without an engine: refusals, windows, shapes, floor."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import ROOT
from transformers import AutoTokenizer
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from diffuplug_bench import engines, gate, problems, report, worker_extension
from diffuplug_bench.cli import build_parser
from diffuplug_bench.gate import ranks_of
from diffuplug_bench.model_shapes import SHAPES, Sizes, autoregressive_config
from diffuplug_bench.options import settings_of
from diffuplug_bench.request_loop import Answer, Arrival, Run, all_decode, steady_window
from diffuplug_bench.settings import Settings
from diffuplug_bench.step import floor, measure, schedule
from dllm_plugin import default_model
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


def answer(*arrivals: tuple[int, int]) -> Answer:
    return Answer([1] * 10, 0.0, [Arrival(*a) for a in arrivals], finished=True)


def test_window_holds_steps_of_all_requests_only() -> None:
    """Steps before both decode, and the tail, take a hundred times as long here."""
    run = Run(
        [
            answer((2, 4), (6, 4), (10, 4), (13, 4)),
            answer((4, 4), (8, 4), (12, 4), (15, 4)),
        ]
    )
    seconds, slow = 0.0, (0, 1, 2, 3, 4, 13, 14, 15)
    for i in range(16):
        seconds += 0.1 if i in slow else 0.001
        run.stamps.append(seconds)
    window = steady_window(run)
    assert (window.first, window.last) == (4, 12)
    assert window.step_ms == pytest.approx(1.0)
    assert measure._context(run, window) == 10 + (8 + 8) / 2


def test_all_decode_once_the_last_one_has_tokens() -> None:
    """Memory is counted, and a trace begins, behind the prompts."""
    run = Run([answer((2, 4), (6, 4)), answer((4, 4))])
    assert all_decode(run, 2) and not all_decode(run, 3)
    run.answers.append(answer())
    assert not all_decode(run, 3)


def test_requests_that_never_met_have_no_window() -> None:
    run = Run(
        [answer((2, 4), (6, 4)), answer((8, 4), (12, 4))], [0.1 * i for i in range(13)]
    )
    with pytest.raises(ValueError, match="never ran all at once"):
        steady_window(run)


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("llada-8b", 7.5, 2 * 32 * 4096 * 2),
        ("dream-7b", 7.07, 2 * 28 * 512 * 2),
        ("sdar-8b", 7.57, 2 * 36 * 1024 * 2),
    ],
)
def test_gemms_are_the_weights_that_the_models_have(
    name: str, billions: float, kv_bytes: int
) -> None:
    """Published sizes, less the embedding (and norms), which is no GEMM."""
    sizes = Sizes.of(SHAPES[name])
    layer = [*sizes.attention_gemms, *sizes.mlp_gemms(sizes.inner)]
    weights = sizes.layers * sum(n * k for n, k in layer) + sizes.vocab * sizes.width
    assert weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert sizes.kv_bytes(1, 2) == kv_bytes


def test_floor_counts_every_gemm_once() -> None:
    sizes = Sizes.of(SHAPES["tiny"])
    weights = floor._weights(sizes, torch.device("cpu"), torch.float32)
    run, work = floor._forward(sizes, weights, count=3)
    run()
    assert work == 2 * 3 * sum(w.numel() for layer in weights for w in layer)


def test_floor_of_experts_reads_those_that_are_hit() -> None:
    sizes = Sizes.of(SHAPES["llada2-mini"])
    assert floor._experts_hit(sizes, 1) == (8, 1)
    hit, rows = floor._experts_hit(sizes, 32)
    assert 150 < hit < 180 and hit * rows >= 32 * 8
    assert floor._experts_hit(sizes, 4096) == (256, 128)


def test_random_weights_have_the_size_of_trained_ones() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.RMSNorm(300))
    matrix, bias, norm = model.parameters()
    for values in (bias, norm):
        values.data.fill_(7.0)
    worker_extension.fill(model, 5)
    first = matrix.detach().clone()
    assert first.std().item() == pytest.approx(0.02, rel=0.02)
    assert not bias.any() and (norm == 1).all()
    worker_extension.fill(model, 6)
    assert (first != matrix).any()
    worker_extension.fill(model, 5)
    assert torch.equal(first, matrix)


def test_autoregressive_models_are_of_the_same_size() -> None:
    for name in ("llada-8b", "dream-7b", "sdar-8b", "tiny"):
        config: dict[str, Any] = SHAPES[name]
        assert Sizes.of(autoregressive_config(config)) == Sizes.of(config)
    with pytest.raises(ValueError, match="llada2_moe"):
        autoregressive_config(SHAPES["llada2-mini"])


def test_fractional_rates_are_an_average_of_whole_schedules() -> None:
    assert schedule.steps_of(6, block=16, rate=3.0) == [5, 5, 6, 5, 5, 6]
    assert schedule.steps_of(2, block=16, rate=3.0) == [5, 6]
    assert set(schedule.steps_of(50, block=32, rate=4.0)) == {8}
    assert sum(schedule.steps_of(270, block=16, rate=2.7)) == 1600
    assert set(schedule.steps_of(5, block=16, rate=16.0)) == {1}


@pytest.mark.parametrize("block", [1, 4, 16, 32, 64, 128])
def test_schedules_give_what_is_asked_for_or_are_refused(block: int) -> None:
    """Of any rate that a block can have, and so of the rounds that the refusal names."""
    for rate in (1 + (block - 1) * i / 60 for i in range(61)):
        for rounds in (1, 2, 3, schedule.MOST_REQUESTS):
            found = rounds * block / sum(schedule.steps_of(rounds, block, rate))
            close = abs(found / rate - 1) <= 0.02
            assert close or rounds < schedule.MOST_REQUESTS
            try:
                schedule.check(rate, 2 * block, rounds, [(block, (1, 4))])
            except ValueError as error:
                named = int(str(error).rsplit("--rounds ", 1)[1].rstrip("."))
                schedule.check(rate, 2 * block, named, [(block, (1, 4))])
                assert not close
            else:
                assert close


def test_only_what_is_served_has_to_be_met() -> None:
    """Two rounds of 16 requests are enough requests; a request alone is not."""
    arguments = (*DUMMY[1:], "3", "--rounds", "2", "--requests", "16")
    assert settings("throughput", *arguments).served_requests(32) == (16,)
    with pytest.raises(ValueError, match="for 1 at once"):
        settings("all", *arguments)


def test_sources_are_told_apart(tmp_path: Path) -> None:
    """Contents, names and where a text lies count; what is no source does not."""
    found = []
    for one, two in ((b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d")):
        (tmp_path / "inner").mkdir(exist_ok=True)
        (tmp_path / "inner" / "one.py").write_bytes(one)
        (tmp_path / "two.py").write_bytes(two)
        found.append(report.hash_of_sources(tmp_path))
    (tmp_path / "note.txt").write_text("no source")
    assert report.hash_of_sources(tmp_path) == found[-1]
    (tmp_path / "two.py").rename(tmp_path / "three.py")
    found.append(report.hash_of_sources(tmp_path))
    assert len(set(found)) == 4
    # Of the package that is measured, whatever the working folder.
    written = report._versions()["sources"]
    assert (
        written == report.hash_of_sources(ROOT / "dllm_plugin") and len(written) == 12
    )


def test_any_model_with_a_chat_template_is_scored() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(default_model.path())
    asked = problems.problems_of(4)
    texts = [problem.answer for problem in asked[:3]] + ["no number here"]
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    for is_bundled in (True, False):
        assert problems.score(tokenizer, answers, asked, is_bundled) == {
            "accuracy": 0.75
        }
    for prompt, item in zip(
        problems.problem_prompts(tokenizer, asked), asked, strict=True
    ):
        assert item.question in tokenizer.decode(prompt) != item.question
    # Without a template there is no telling how to ask.
    tokenizer.chat_template = None
    assert (
        tokenizer.decode(problems.problem_prompts(tokenizer, asked)[0])
        == asked[0].question
    )
    unscored = problems.score(tokenizer, answers, asked, False)
    assert (
        unscored["accuracy"] is None and "no chat template" in unscored["accuracy_note"]
    )
    assert report.table_of("served", [unscored]).split() == ["accuracy", "-"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 + 7 = 12\n#### 12\nin 3 steps", 12),
        ("She has 5 and gets 7, so she has 12.", 12),
        ("The total is $1,200.00.", 1200),
        (r"Hence \boxed{-4}", -4),
        ("Pages 5-12", 12),
        ("no number", None),
    ],
)
def test_result_of_an_answer(text: str, number: int | None) -> None:
    """The bundled model was taught a mark, and without it has not answered."""
    assert problems.number_of(text, is_bundled=False) == number
    assert problems.number_of(text, is_bundled=True) == (
        number if "####" in text else None
    )


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
