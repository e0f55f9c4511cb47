"""The command line's surface, and what people see when they get it wrong."""

import argparse
import gc
import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from diffuplug_bench import cli as bench
from dllm_plugin import default_model
from dllm_plugin.commands import cli, models, phases, serve, server
from dllm_plugin.commands.offline import (
    collecting_later,
    engine_options,
)
from dllm_plugin.commands.options import check_spelling, flag_of
from dllm_plugin.config.options import OPTIONS
from dllm_plugin.config.validation import NAMES, Flag
from dllm_plugin.decoding.families import LLADA
from dllm_plugin.decoding.methods import POLICIES, STRATEGIES, choose_method

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "checkpoints"
TINY = str(CHECKPOINTS / "tiny-llada")
STOP_STRINGS = "VLLM_MAX_STOP_STRINGS"

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
SWITCHES = [name for name, known in OPTIONS.items() if isinstance(known.check, Flag)]
SERVE = [*map(flag_of, OPTIONS), "--model"]
SERVE += ["--no-" + flag_of(name)[2:] for name in SWITCHES]
COMMAND_OPTIONS = {
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
    "models": ["--help", "-h"],
    "report": ["--help", "-h"],
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
        + ["--adaptive", "--min-window", "--max-window", "--canvas-length", "--model"]
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
    "serve": sorted([*SERVE, "--help", "-h"]),
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
        + ["--trust-remote-code", "--model"]
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
        surface(cli.build_parser()) | surface(bench.build_parser(), "bench")
        == COMMAND_OPTIONS
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
        (["eval", "--model", "x"], "--model needs --questions or --schedule"),
        (["eval", "--threshold", "0.5"], "--threshold needs --questions or --schedule"),
        (["eval", "--schedule", "8,x"], "--schedule must be widths"),
        (["eval", "--schedule", "8", "--all"], "--all has policies of its own"),
        (
            ["eval", "--schedule", "8", "--questions", "/no/such/file"],
            "No such file or directory",
        ),
        (
            ["eval", "--schedule", "8", "--json"],
            "leave --all, --schedule and --questions out",
        ),
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
    assert cli.main(arguments) == 2
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
        ["generate", "x", "--treshold", "0.9"],
        ["doctor", "some/model", "--model", "another/model"],
    ],
)
def test_wrong_usage_is_one_sentence_and_exits_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("diffuplug: error: ") and printed.count("\n") == 1


def test_bundled_model_is_the_default() -> None:
    args = cli.build_parser().parse_args(["generate", "x"])
    options = engine_options(args)
    assert options["model"] == default_model.path()
    assert options["additional_config"] == {"dllm": {}}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bundled_model_by_a_strategy(strategy: str) -> None:
    """It gets its adapter for the strategy that uses it in the table of methods."""
    args = cli.build_parser().parse_args(["generate", "x", "--strategy", strategy])
    dllm = {"strategy": strategy}
    method, _ = choose_method(strategy, LLADA, adapted=True)
    if method.uses_adapter:
        dllm["lora_path"] = default_model.adapter_path()
    assert engine_options(args)["additional_config"] == {"dllm": dllm}


def served(*arguments: str) -> list[str]:
    """What vLLM is given, on a port that is free."""
    return serve.server_arguments([*arguments, "--port", "0"])


def section_of(arguments: list[str]) -> dict[str, Any]:
    """Our options among the arguments of vLLM."""
    config = json.loads(arguments[arguments.index("--additional-config") + 1])
    return dict(config["dllm"])


def test_serve_passes_everything_on() -> None:
    """What the server adds are defaults, which a file of options may replace."""
    given = [TINY, "--served_model_name=x", "--additional-config", "{}", "-tp", "2"]
    port = ["--port", "0"]
    assert served(*given) == [TINY, "--served-model-name=x", "-tp", "2", *port]


def test_serve_reads_the_model_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: other\nadditional_config: {dllm: {threshold: 0.5}}\n")
    assert default_model.path() not in served("--config", str(file))
    with pytest.raises(ValueError, match="--threshold would replace additional-config"):
        served("--config", str(file), "--threshold", "0.8")
    file.write_text("port: 8001\n")
    assert default_model.path() in served("--config", str(file))
    file.write_text("- a list\n")
    with pytest.raises(ValueError, match="must map options to values"):
        served("--config", str(file))
    with pytest.raises(ValueError, match="cannot be read"):
        served("--config", str(tmp_path / "nothing"))


def test_serve_merges_spellings_of_the_configuration() -> None:
    """Dotted ones and objects; of an option given twice the last one counts."""
    dotted = ["--additional-config.dllm.threshold", "0.8"]
    whole = ["--additional-config", '{"dllm": {"strategy": "d2f"}}']
    expected = {"threshold": 0.8, "strategy": "d2f"}
    assert section_of(served(TINY, *dotted, *whole)) == expected
    assert section_of(served(TINY, *whole, *dotted)) == expected
    ports = ["--port", "1", "--port=2", "--hf-overrides.a", "b"]
    assert serve.value_of(ports, "--port") == "2"
    assert serve.value_of(ports, "--hf-overrides") == "b"


@pytest.mark.parametrize("option", [["--model", TINY], [f"--model={TINY}"]])
def test_serve_takes_the_model_as_an_option(option: list[str]) -> None:
    assert served(*option)[0] == TINY
    assert default_model.path() not in served(*option)


def test_serve_without_a_model_fills_in_the_bundled_one() -> None:
    arguments = served()
    assert arguments[0] == default_model.path()
    assert "--additional-config" not in arguments


@pytest.mark.parametrize(
    "spelling",
    [
        ["--additional-config", "{}"],
        ["--additional_config={}"],
        ["--additional-config.dllm.threshold", "0.5"],
    ],
)
def test_serve_keeps_a_given_configuration(spelling: list[str]) -> None:
    assert default_model.adapter_path() not in " ".join(served(*spelling))


@pytest.mark.parametrize(
    ("flags", "section"),
    [
        (["--strategy", "dual_cache"], {"strategy": "dual_cache"}),
        (["--canvas_length=64"], {"canvas_length": 64}),
        (
            ["--threshold", "0.5", "--use-block-cache"],
            {"threshold": 0.5, "use_block_cache": True},
        ),
        (["--additional-config.dllm.threshold=0.5"], {"threshold": 0.5}),
        (
            ['--additional-config={"dllm": {"policy": "factor"}}', "--factor", "2"],
            {"policy": "factor", "factor": 2},
        ),
    ],
)
def test_serve_takes_our_options_as_flags(
    flags: list[str], section: dict[str, Any]
) -> None:
    assert section_of(served(TINY, *flags)) == section


def test_flags_choose_the_bundled_adapter() -> None:
    adapter = {"lora_path": default_model.adapter_path()}
    assert section_of(served("--threshold", "0.5")) == {"threshold": 0.5}
    assert section_of(served("--strategy", "dual_cache")) == {"strategy": "dual_cache"}
    assert section_of(served("--strategy", "d2f")) == adapter | {"strategy": "d2f"}
    by_widths = {"adaptive": "throughput"}
    assert section_of(served("--adaptive", "throughput")) == adapter | by_widths
    options = ["--adaptive", "throughput", "--strategy", "block_diffusion"]
    assert section_of(served(*options)) == by_widths | {"strategy": "block_diffusion"}


def test_names_that_are_known_without_torch() -> None:
    assert {"strategy": ("auto", *STRATEGIES), "policy": ("auto", *POLICIES)} == NAMES


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (['--additional-config={"dllm": {"strategy": "dualcache"}}'], "is unknown"),
        (["--strategy", "dualcache"], "strategy 'dualcache' is unknown"),
        (["--additional-config.dllm.treshold", "1"], "'treshold'"),
        (["--additional-config", "{"], "--additional-config is no JSON"),
        (["--additional-config", "[]"], "must be a JSON object, got []"),
        (["--additional-config", '{"dllm": 1}'], "'dllm' must be a JSON object"),
        (["--treshold", "0.9"], "no option --treshold (did you mean --threshold?)"),
        (["--block-length", "x"], "block_length must be a whole number"),
        (["/no/folder"], "there is no folder /no/folder"),
        ([TINY.replace("llada", "lada")], "did you mean tiny-llada?"),
        (["no/body"], "there is no folder no/body, and the hub's cache"),
        (["a b"], "'a b' is neither a folder nor a name on the hub"),
        ([str(Path(__file__).parent)], "holds no config.json"),
        (["--port", "x"], "--port must be a number from 0 to 65535, got 'x'"),
    ],
)
def test_wrong_options_of_serve_are_one_sentence(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert cli.main(["serve", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("diffuplug: error: ") and sentence in printed.err


def test_a_taken_port_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--host", "127.0.0.1", "--port", str(port)]) == 2
    sentence = f"the server cannot listen at 127.0.0.1:{port}: Address already in use"
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["LLaDAModelLMM"]}, "did you mean LLaDAModelLM?"),
        ({"architectures": ["LlamaForCausalLM"]}, "threshold would have no effect"),
    ],
)
def test_an_architecture_that_does_not_fit(
    changes: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    assert cli.main(["serve", str(model), "--threshold", "0.5"]) == 2
    assert sentence in capsys.readouterr().err
    assert cli.main(["generate", "x", "--model", str(model)]) == 2
    assert "is no model of DiffuPlug" in capsys.readouterr().err


def test_an_architecture_that_nobody_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence with the nearest ones, where vLLM would ask for trust in remote code."""
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LLaDA3MoeModel"], "model_type": "llada3"}
    config["auto_map"] = {"AutoConfig": "configuration_llada3.Config"}
    (model / "config.json").write_text(json.dumps(config))
    name = str(model)
    commands = (
        ["generate", "x", "--model", name],
        ["infill", "x[MASK:3]", "--model", name],
        ["eval", "--schedule", "32,2", "--model", name],
        ["verify", name],
        *(["bench", "step", name], ["bench", "host", "--model", name]),
    )
    for command in commands:
        assert cli.main(command) == 2, command
        printed = capsys.readouterr().err
        assert "its architecture is LLaDA3MoeModel" in printed
        assert "LLaDA2MoeModelLM" in printed and "trust_remote_code" not in printed
        assert printed.count("\n") == 1


def test_where_vllm_looks_for_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are left to vLLM if it looks for them elsewhere than on the hub."""
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    models.check_model("somebody/something")
    with pytest.raises(ValueError, match="holds no config.json"):
        models.check_model(str(Path(TINY).parent))


def test_a_hub_that_is_slow_may_be_reached() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert models._reachable(address)
    assert not models._reachable(address)


def test_a_folder_without_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(TINY) / "config.json", tmp_path)
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "holds no weights" in capsys.readouterr().err


def test_wrong_options_import_neither_torch_nor_vllm() -> None:
    """Which is what makes them quick."""
    program = (
        "import sys; from dllm_plugin.commands import cli; status = cli.main(sys.argv[1:]);"
        "sys.exit(status + 10 * ('torch' in sys.modules or 'vllm' in sys.modules))"
    )
    for command in ("serve", "generate"):
        arguments = [command, "x", "--strategy", "d2f", "--threshold", "3"]
        done = subprocess.run([sys.executable, "-c", program, *arguments], check=False)
        assert done.returncode == 2


def test_no_model_of_vllm_is_taken_for_one_of_ours(tmp_path: Path) -> None:
    from vllm import ModelRegistry

    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    for architecture in sorted(set(ModelRegistry.get_supported_archs())):
        config = {"architectures": [architecture]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        models.check_served(str(tmp_path), {})


def test_no_option_of_vllm_is_taken_for_one_of_ours() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    theirs = list(make_arg_parser(FlexibleArgumentParser())._option_string_actions)
    assert not set(theirs) & {flag_of(name) for name in OPTIONS}
    check_spelling(theirs, [flag_of(name) for name in OPTIONS])


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
    program = "from dllm_plugin.commands import cli; cli.main(['generate', ' ']); import torch"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=ours | {"OMP_DISPLAY_ENV": "verbose"} | set_by_the_user,
        capture_output=True,
        text=True,
    )
    assert "the prompt is empty" in done.stderr
    assert f"GOMP_SPINCOUNT = '{count}'" in done.stderr


@pytest.mark.parametrize(
    ("start", "count"),
    [
        (lambda: served(), "1000"),
        (lambda: served(TINY), None),
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


@pytest.mark.parametrize(("given", "most"), [(None, "64"), ("7", "7")])
def test_serve_takes_as_many_stop_strings_as_editors_send(
    given: str | None, most: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is raised before vLLM is imported, unless the user sets one."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_PLUGINS", serve.ENDPOINTS)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv(STOP_STRINGS, "")  # so that it is as before afterwards
    monkeypatch.delenv(STOP_STRINGS)
    if given is not None:
        monkeypatch.setenv(STOP_STRINGS, given)
    with pytest.raises(ValueError, match="there is no option --no-such-option"):
        serve.run([TINY, "--port", "0", "--no-such-option"])
    assert os.environ[STOP_STRINGS] == most


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
    module, _, name = server.MIDDLEWARE.rpartition(".")
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
