"""What `diffuplug serve` gives vLLM, and what it refuses before vLLM is imported."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from command_lines import IDLM, LLADA22, NEMOTRON, SDAR, TINY, WEDLM, section_of, served

from dllm_plugin import default_model
from dllm_plugin.commands import cli, models, serve
from dllm_plugin.commands.options import (
    WITH_SEVERAL,
    WITHOUT_VALUE,
    check_spelling,
    flag_of,
    take_model,
)
from dllm_plugin.config.options import OPTIONS

STOP_STRINGS = "VLLM_MAX_STOP_STRINGS"


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


@pytest.mark.parametrize(
    "options",
    [
        "--threshold 0.9",
        "--enforce-eager",
        "--max-model-len -1",
        "--port=8001",
        "-tp 2 -O3",
        "--served-model-name a b",
        "--api-key a b --trust-remote-code",
        "--served-model-name=a",
        "--cudagraph-capture-sizes 1 2 4",
        "--hf-overrides.a b",
        "--additional-config {}",
        "--hf-token a",
    ],
)
def test_serve_takes_the_model_after_options(options: str) -> None:
    """As it does before them, and between them."""
    words = options.split()
    expected = served(TINY, *words)
    assert served(*words, TINY) == expected
    assert expected[0] == TINY
    with pytest.raises(ValueError, match="two models are named: x and"):
        served("x", *words, TINY)


def test_values_that_are_no_models() -> None:
    """A name of the only value of an option is no model, be it written like one."""
    for option in ("--served-model-name", "--tokenizer", "--hf-config-path"):
        model, rest = take_model([option, TINY])
        assert (model, rest) == (None, [option, TINY])


def test_serve_knows_how_many_values_options_of_vllm_take() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    commands = FlexibleArgumentParser().add_subparsers()
    several = set()
    for action in ServeSubcommand().subparser_init(commands)._actions:
        for option in action.option_strings:
            without = WITHOUT_VALUE.fullmatch(option) is not None
            assert without == (action.nargs == 0), option
        if action.nargs in ("+", "*"):
            several |= set(action.option_strings)
    assert several == set(WITH_SEVERAL)


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
            ["--threshold", "0.5", "--logits-eos-inf"],
            {"threshold": 0.5, "logits_eos_inf": True},
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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (['--additional-config={"dllm": {"strategy": "dualcache"}}'], "is unknown"),
        (["--strategy", "dualcache"], "strategy 'dualcache' is unknown"),
        (['--additional-config={"dlm": {}}'], "no section 'dlm' (did you mean dllm?)"),
        (["--additional-config.DLLM.threshold", "1"], "no section 'DLLM'"),
        (
            ["--strategy=d2f", "--additional-config.dllm.strategy=nope"],
            "strategy is given twice: 'd2f' by --strategy and 'nope' in --additional",
        ),
        (["--additional-config.dllm.treshold", "1"], "'treshold'"),
        (["--additional-config", "{"], "--additional-config is no JSON"),
        (["--additional-config", "[]"], "must be a JSON object, got []"),
        (["--additional-config", '{"dllm": 1}'], "'dllm' must be a JSON object"),
        (["--treshold", "0.9"], "no option --treshold (did you mean --threshold?)"),
        (["--block-length", "x"], "block_length must be a whole number"),
        (["/no/folder"], "there is no folder /no/folder"),
        (["a", "--model", "b"], "two models are named: a and b"),
        (["a", "b"], "two models are named: a and b"),
        (["--chat-template", "a.jinja"], "--chat-template a.jinja is no file"),
        (["--quantization", "int8"], "--quantization int8 is unknown to vLLM"),
        (["-q=int3"], "--quantization int3 is unknown to vLLM"),
        (
            ["--kv-cache-dtype", "fp9"],
            "--kv-cache-dtype fp9 is unknown to vLLM (did yo",
        ),
        (
            ["--max-model-len", "5000"],
            "--max-model-len 5000 is longer than the context",
        ),
        (
            [WEDLM, "--canvas-length", "2"],
            "window 16 needs a canvas of 32 positions, g",
        ),
        (
            [IDLM, "--canvas-length", "2"],
            "block_length 4 needs a canvas of 8 positions",
        ),
        (
            [LLADA22, "--block-length", "16"],
            "block_length 16 is not the 32 of this mod",
        ),
        (
            [NEMOTRON, "--canvas-length", "8"],
            "8 is longer than the canvas of 7 positio",
        ),
        (
            [SDAR, "--canvas-length", "16", "--max-active-blocks", "8"],
            "max_active_blocks 8 of 4 positions do not fit canvas_length 16: lower",
        ),
        (
            ["--strategy=d2f", "--canvas-length=8"],
            "block_length 32 is longer than the ",
        ),
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


@pytest.mark.parametrize(
    "value",
    ["--max-model-len=1_0", "--max-model-len=auto", "--max-model-len=-1", "-tp=+1"]
    + ["--max-num-batched-tokens=2.5k", "--quantization=None", "--max-num-seqs= 8 "],
)
def test_values_that_vllm_takes(value: str) -> None:
    assert value in served(TINY, value)


def test_a_taken_port_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--host", "127.0.0.1", "--port", str(port)]) == 2
    sentence = f"the server cannot listen at 127.0.0.1:{port}: Address already in use"
    assert sentence in capsys.readouterr().err


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
