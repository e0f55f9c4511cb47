"""The command line's surface, and what people see when they get it wrong."""

import argparse
import gc
import importlib.util
import io
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffuplug_bench import cli as bench
from dllm_plugin import default_model
from dllm_plugin.commands import cli, phases, serve
from dllm_plugin.commands.offline import collecting_later, engine_options

DECODE = [
    "--block-length",
    "--kv-cache-layout",
    "--lora-path",
    "--policy",
    "--strategy",
    "--threshold",
]
ENGINE = ["--dtype", "--gpu-memory-utilization", "--model"]
REFRESHES = ["--full-refresh-every", "--refresh-before", "--suffix-window"]
MEASURED = [
    "--block-length",
    "--canvas",
    "--dtype",
    "--enforce-eager",
    "--gpu-memory-utilization",
]
MEASURED += [
    "--help",
    "--lora-path",
    "--model",
    "--seed",
    "--shapes",
    "--strategy",
    "--threshold",
]
MEASURED += [
    "--attention-backend",
    "--compilation-config",
    "--compile-step",
    "--no-compile-step",
]
MEASURED += [
    "--commit-alone-from",
    "--kv-cache-layout",
    "--kv-cache-memory-bytes",
    *REFRESHES,
    "--tensor-parallel-size",
    "--vocab-parallel",
    "--no-vocab-parallel",
]
MEASURED += ["--vs", "-h"]
CHECKPOINT = {"--approximations", "--lora-path", "--model", "--threshold", "--vs"}
GRID = ["--max-positions", "--requests"]
STEPS = ["--context", "--profile"]
SERVED = [
    "--input-len",
    "--output-len",
    "--rounds",
    "--tokens-per-forward",
    "--approximations",
]
OPTIONS = {
    "": ["--help", "--version", "-h"],
    "bench": ["--help", "-h"],
    "bench host": sorted(
        [*DECODE, *ENGINE, "--help", "--max-tokens", "--requests", "--seed", "-h"]
    ),
    "bench adaptive": sorted(
        [
            *MEASURED,
            *GRID,
            *SERVED,
            "--acceptance",
            "--adaptive",
            "--min-window",
            "--widths",
        ]
    ),
    "bench all": sorted([*MEASURED, *GRID, *STEPS, *SERVED]),
    "bench map": sorted(
        {*MEASURED, "--requests", "--acceptance", "--contexts", "--picture", "--widths"}
        - {*CHECKPOINT, *REFRESHES, "--block-length"}
    ),
    "bench latency": sorted([*MEASURED, *SERVED]),
    "bench step": sorted([*MEASURED, *GRID, *STEPS]),
    "bench throughput": sorted([*MEASURED, *GRID, *SERVED]),
    "bench watched": sorted({*MEASURED, *GRID, *SERVED, "--watched"} - CHECKPOINT),
    "doctor": sorted(
        [
            *DECODE,
            "--acceptance",
            "--context",
            "--dtype",
            "--help",
            "--requests",
            "--step-ms",
            "-h",
        ]
        + ["--adaptive", "--min-window", "--max-window", "--canvas-length"]
    ),
    "eval": sorted(
        [
            *DECODE,
            "--all",
            "--dtype",
            "--help",
            "--json",
            "--limit",
            "--model",
            "--output",
        ]
        + ["--questions", "--refreshes", "--schedule", "--verbose", "-h", "-v"]
    ),
    "generate": sorted(
        [
            *DECODE,
            *ENGINE,
            "--chat",
            "--help",
            "--max-tokens",
            "--raw",
            "--seed",
            "--temperature",
        ]
        + ["--top-p", "--verbose", "-h", "-v", "--json-schema", "--regex", "--choice"]
    ),
    "infill": sorted(
        [
            *DECODE,
            *ENGINE,
            "--help",
            "--question",
            "--seed",
            "--temperature",
            "--verbose",
            "-h",
        ]
        + ["-v"]
    ),
    "serve": ["--help", "-h"],
    "watch": sorted(
        [
            *DECODE,
            *ENGINE,
            "--api-key",
            "--help",
            "--max-tokens",
            "--url",
            "--verbose",
            "-h",
            "-v",
        ]
    ),
    "verify": sorted(
        [
            *DECODE,
            "--dtype",
            "--help",
            "--limit",
            "--prompts",
            "--tensor-parallel-size",
            "-h",
        ]
        + ["--trust-remote-code"]
    ),
}


def surface(parser: argparse.ArgumentParser, name: str = "") -> dict[str, list[str]]:
    """Option strings of a parser and of all below it."""
    found = {
        name: sorted(o for action in parser._actions for o in action.option_strings)
    }
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below, sub in action.choices.items():
                found |= surface(sub, f"{name} {below}".strip())
    return found


def test_options_are_frozen() -> None:
    assert (
        surface(cli.build_parser()) | surface(bench.build_parser(), "bench") == OPTIONS
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["generate", "x", "--threshold", "1.5"],
            "threshold must be a number between 0.0 and 1.0",
        ),
        (["generate", "x", "--strategy", "magic"], "strategy 'magic' is unknown"),
        (["generate", "x", "--policy", "best"], "policy 'best' is unknown"),
        (
            ["doctor", "--kv-cache-layout", "paged"],
            "kv_cache_layout 'paged' is unknown",
        ),
        (
            ["generate", "x", "--block-length", "0"],
            "block_length must be a whole number",
        ),
        (
            ["generate", "x", "--model", "/no/such/folder"],
            "there is no folder /no/such/folder",
        ),
        (["generate", " "], "the prompt is empty"),
        (
            ["generate", "x", "--json-schema", "/no/such/file"],
            "No such file or directory",
        ),
        (["generate", "x", "--json-schema", __file__], "--json-schema"),
        (["generate", "x", "--choice", ","], "--choice ',' holds no word"),
        (["doctor", "./none"], "there is no folder ./none"),
        (["verify", "./none"], "there is no folder ./none"),
        (["verify", "--policy", "best"], "policy 'best' is unknown"),
        (["verify", "--prompts", "/no/such/file"], "No such file or directory"),
        (["doctor", "--context", "8"], "--context needs --requests"),
        (["doctor", "--requests", "8", "--acceptance", "2"], "--acceptance must be"),
        (["doctor", "--requests", "8", "--adaptive", "off"], "--adaptive off has none"),
        (["doctor", "--adaptive", "fast"], "adaptive 'fast' is unknown"),
        (["doctor", "--requests", "8", "--min-window", "0"], "min_window must be"),
        (["bench", "adaptive", "--acceptance", "0.9:2"], "--acceptance needs --shapes"),
        (["bench", "adaptive", "--widths", "2,x"], "--widths must be whole numbers"),
        (
            ["bench", "adaptive", "--shapes", "tiny", "--widths", "64"],
            "--canvas must be one length of at least 64 positions, got 32",
        ),
        (
            ["bench", "adaptive", "--adaptive", "off", "--widths", "2"],
            "--widths 2 has no effect",
        ),
        (
            ["bench", "adaptive", "--approximations", "::32"],
            "--approximations are of full",
        ),
        (
            ["bench", "host", "--requests", "0,1"],
            "--requests must be whole numbers of at least 1",
        ),
        (
            ["bench", "map", "--shapes", "tiny", "--canvas", "8,16"],
            "--canvas must be one length",
        ),
        (
            ["watch", "--url", "http://x", "--strategy", "d2f"],
            "--strategy has no effect with --url",
        ),
        (
            ["watch", "--url", "http://x", "--dtype", "half"],
            "--dtype has no effect with --url",
        ),
        (["watch", "--api-key", "k"], "--api-key is that of a server"),
        (["bench", "map", "--requests", "1,2"], "bench map needs --shapes"),
        (
            ["bench", "map", "--shapes", "tiny", "--widths", "64"],
            "--widths must be whole numbers",
        ),
        (
            ["bench", "map", "--shapes", "tiny", "--contexts", "0"],
            "--contexts must be whole",
        ),
        (
            ["bench", "map", "--shapes", "tiny", "--contexts", "5000"],
            "but the model has 4096",
        ),
        (["eval", "--model", "x"], "--model needs --schedule"),
        (["eval", "--threshold", "0.5"], "--threshold needs --schedule"),
        (["eval", "--schedule", "8,x"], "--schedule must be widths"),
        (["eval", "--schedule", "8", "--all"], "--all has policies of its own"),
        (
            ["eval", "--schedule", "8", "--questions", "/no/such/file"],
            "No such file or directory",
        ),
        (["eval", "--schedule", "8", "--json"], "leave --all and --schedule out"),
        (["eval", "--output", "."], "--output is where --all writes: add --all"),
        (
            ["eval", "--schedule", "8", "--output", "."],
            "--output is where --all writes: add --all",
        ),
        (["eval", "--all", "--refreshes"], "--refreshes is alone, or a part of --all"),
        (
            ["eval", "--all", "--output", "/no/such/folder"],
            "/no/such/folder is not a folder",
        ),
    ],
)
def test_error_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("diffuplug: error: ") and sentence in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["generate"],
        ["bench"],
        ["eval", "--limit", "0"],
        ["generate", "x", "--chat", "--raw"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2


def test_bundled_model_is_the_default() -> None:
    args = cli.build_parser().parse_args(["generate", "x"])
    options = engine_options(args)
    assert options["model"] == default_model.path()
    assert options["additional_config"] == {
        "dllm": {"lora_path": default_model.adapter_path()}
    }


def test_bundled_model_without_its_adapter() -> None:
    args = cli.build_parser().parse_args(
        ["generate", "x", "--strategy", "block_diffusion"]
    )
    assert engine_options(args)["additional_config"] == {
        "dllm": {"strategy": "block_diffusion"}
    }


def test_serve_passes_everything_through() -> None:
    command = serve.server_command(
        ["some/model", "--port", "1", "--additional-config", "{}"]
    )
    assert command[0] == sys.executable
    assert command[-4:] == ["--port", "1", "--additional-config", "{}"]
    # `vllm serve` wants the model first; only our middleware comes in between.
    between = [part for name in serve.MIDDLEWARE for part in ("--middleware", name)]
    assert command[-9:-4] == ["some/model", *between]


@pytest.mark.parametrize("option", [["--model", "m"], ["--model=m"]])
def test_serve_with_a_model_option_adds_nothing(option: list[str]) -> None:
    assert serve.server_command(option)[-len(option) :] == option
    assert default_model.path() not in serve.server_command(option)


def test_serve_without_a_model_fills_in_the_bundled_one() -> None:
    command = serve.server_command(["--port", "1"])
    assert default_model.path() in command
    config = json.loads(command[command.index("--additional-config") + 1])
    assert config == {"dllm": {"lora_path": default_model.adapter_path()}}


@pytest.mark.parametrize(
    "spelling",
    [
        ["--additional-config", "{}"],
        ["--additional_config={}"],
        ["--additional-config.dllm", "{}"],
    ],
)
def test_serve_keeps_a_given_configuration(spelling: list[str]) -> None:
    assert default_model.adapter_path() not in " ".join(serve.server_command(spelling))


@pytest.mark.parametrize(
    ("set_by_the_user", "count"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "0"),
    ],
)
def test_how_threads_wait(set_by_the_user: dict[str, str], count: str) -> None:
    """As libgomp itself says, which reads it when torch is loaded."""
    # vLLM has libgomp loaded ahead in the processes of a process that has built an engine.
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "LD_PRELOAD")
    ours = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "dllm_plugin.commands.cli", "generate", " "]
    done = subprocess.run(
        command,
        env=ours | {"OMP_DISPLAY_ENV": "verbose"} | set_by_the_user,
        capture_output=True,
        text=True,
    )
    assert "the prompt is empty" in done.stderr
    assert f"GOMP_SPINCOUNT = '{count}'" in done.stderr


@pytest.mark.parametrize(
    ("start", "count"),
    [
        (lambda: serve.server_command([]), "1000"),
        (lambda: serve.server_command(["some/model"]), None),
        (lambda: cli.main(["generate", " ", "--model", default_model.path()]), None),
    ],
)
def test_how_threads_of_a_server_or_another_model_wait(
    start: Callable[[], Any], count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    start()
    assert os.environ.get("GOMP_SPINCOUNT") == count


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"]])
def test_help_is_light(arguments: list[str]) -> None:
    """Help is printed without importing torch or vLLM, that of all commands without bench."""
    program = (
        "import atexit, os, sys\n"
        "from dllm_plugin.commands import cli\n"
        "heavy = {'torch', 'vllm'} | ({'diffuplug_bench'} if len(sys.argv) == 2 else set())\n"
        "atexit.register(lambda: os._exit(bool(heavy & set(sys.modules))))\n"
        "cli.main()"
    )
    root = Path(cli.__file__).parents[2]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=root, check=False, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


@pytest.mark.parametrize("words", [["bench", "host"], ["eval", "--schedule", "8"]])
def test_a_command_of_a_distribution_that_is_not_installed(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """As with a folder in PYTHONPATH, which has no metadata."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"diffuplug: error: `diffuplug {' '.join(words[:2])[:5]}")
    assert "which is not installed here: run `pip install`" in error


def test_garbage_is_collected_again() -> None:
    """Also behind an error, and not where somebody had switched it off."""
    with pytest.raises(ValueError), collecting_later():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with collecting_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_servers_middleware_exists() -> None:
    for arguments in (["some/model", "--port", "1"], ["--port", "1"]):
        command = serve.server_command(arguments)
        given = [b for a, b in itertools.pairwise(command) if a == "--middleware"]
        assert given == list(serve.MIDDLEWARE)
        for middleware in given:
            module, _, name = middleware.rpartition(".")
            assert isinstance(getattr(importlib.import_module(module), name), type)


def test_phases_are_found_in_the_log_of_vllm() -> None:
    """Each marker stands in vLLM's source, where the step begins."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])  # type: ignore
    sources = ("v1/engine/core.py", "v1/worker/gpu/model_runner.py")
    text = "".join((folder / source).read_text(encoding="utf-8") for source in sources)
    for marker in phases.MARKERS:
        assert marker in text, marker


def test_phases_are_a_line_each_in_a_log(tmp_path: Path) -> None:
    log, err = tmp_path / "log", io.StringIO()
    log.touch()
    with phases.Screen(err, io.StringIO(), log) as screen:
        for marker in phases.MARKERS:
            with log.open("a") as stream:
                stream.write(f"(Worker pid=1) INFO [x.py:1] {marker} ...\n")
            deadline = time.monotonic() + 60
            while list(phases.MARKERS.values())[-1] not in err.getvalue():
                assert time.monotonic() < deadline, marker
                if phases.MARKERS[marker] in err.getvalue():
                    break
                time.sleep(0.01)
        assert screen.bar("decoding") is False
        screen.end("done")
    shown = [line.partition("] ")[2] for line in err.getvalue().splitlines()]
    assert shown == [phases.FIRST, *phases.MARKERS.values(), "decoding", "done"]


def test_the_cause_of_a_failure_is_the_last_error_that_is_no_consequence(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    log.write_text(
        "ERROR [core.py:1] Traceback\n"
        "ERROR [core.py:2] ValueError: Not enough memory: lower it\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert phases.cause(log) == "Not enough memory: lower it"
    log.write_text("all is well\n")
    assert phases.cause(log) is None


@pytest.mark.parametrize("command", [["doctor"], ["generate", "x"]])
def test_a_build_for_devices_that_are_not_there(
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As vLLM for CUDA finds a machine that has no GPU."""
    from vllm import platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    monkeypatch.setattr(platforms, "current_platform", UnspecifiedPlatform())
    assert cli.main(command) == 1
    written = capsys.readouterr()
    said = written.out if command == ["doctor"] else written.err
    assert "finds no device that it is built for: does `nvidia-smi` list a GPU?" in said
