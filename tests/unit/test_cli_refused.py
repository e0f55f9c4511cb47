"""What people see when they get a command line wrong: one sentence."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from command_lines import LIGHT, LLADA22, SDAR, TINY

from dllm_plugin.commands import cli, doctor, models, options, phases


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
        (["generate", "x", "--model", ""], "the name of the model is empty"),
        (["serve", "--model="], "the name of the model is empty"),
        (["serve", "sadr:8b"], "sadr:8b is no short name"),
        (["doctor", "LLaDA:8B"], "did you mean llada:8b?"),
        (["generate", "x", "--model", "LLaDA"], "did you mean llada:8b?"),
        (["generate", "x", "--lora-path", "/no/such"], "there is no folder /no/such"),
        (["generate", "x", "--lora-path", "/etc"], "/etc holds no adapter_config.json"),
        (["serve", "--lora-path", "/etc"], "lora_path /etc holds no adapter_config"),
        (["serve", "--tokenizer", "./none"], "there is no folder ./none"),
        (["serve", "--ssl-keyfile", "/none"], "--ssl-keyfile /none is no file"),
        (["serve", "--chat-template=/none"], "--chat-template /none is no file"),
        (["serve", "--uds", "/none/socket"], "there is no folder /none for --uds"),
        (["generate", " "], "the prompt is empty"),
        (["generate", "x", "--json-schema", "[1]"], "[1] is neither a JSON object nor"),
        (["generate", "x", "--json-schema", "a" * 999], "aaa is neither a JSON object"),
        (["generate", "x", "--json-schema", '{"a"'], "--json-schema: Expecting ':'"),
        (["generate", "x", "--json-schema", __file__], "--json-schema"),
        (["generate", "x", "--json-schema", "/dev/null"], "/dev/null: Expecting value"),
        (["generate", "x", "--choice", ","], "--choice ',' holds no word"),
        (["generate", "x", "--regex", ""], "--regex is empty"),
        (["serve", "--canvas-length", "5000"], "longer than the context of 1024 tok"),
        (["infill", "[MASK:2,5000]"], "[MASK:n] 5000 is longer than the context"),
        (["infill", "[MASK:2]", "--strategy", ""], "strategy '' is unknown"),
        (["eval", "--schedule", "64,5000"], "max_window 5000 is longer than the con"),
        (["serve", "--block-length", str(10**13)], "block_length must be at most"),
        (["doctor", "./none"], "there is no folder ./none"),
        (["verify", "./none"], "there is no folder ./none"),
        (["verify", "--policy", "best"], "policy 'best' is unknown"),
        (["verify", "--prompts", "/no/such/file"], "--prompts /no/such/file: No such"),
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
            ["watch", "--url", "http://x", "--kv-cache-layout", "auto"],
            "--kv-cache-layout has no effect with --url",
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
        (["eval", "--gpu-memory-utilization", "0.5"], "needs --questions or --sch"),
        (["eval", "--threshold", "0.5"], "--threshold needs --questions or --schedule"),
        (["eval", "--schedule", "8,x"], "--schedule must be widths"),
        (["eval", "--schedule", "8", "--all"], "--all has policies of its own"),
        (
            ["eval", "--schedule", "8", "--questions", "/no/such/file"],
            "--questions /no/such/file: No such file or directory",
        ),
        (
            ["eval", "--schedule", "8", "--json"],
            "leave --all, --schedule and --questions out",
        ),
        (["bench", "adaptive", "--profile"], "--profile traces the strategies"),
        (["eval", "--output", "."], "--output is where --all writes: add --all"),
        (
            ["eval", "--schedule", "8", "--output", "."],
            "--output is where --all writes: add --all",
        ),
        (
            ["eval", "--all", "--refreshes"],
            "--refreshes stands by itself, or a part of --all",
        ),
        (["eval", "--all", "--output", "/no/such"], "/no/such is not a folder"),
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
        ["generate", "x", "--temperature", "-1"],
        ["generate", "x", "--temperature=nan"],
        ["infill", "[MASK:2]", "--temperature=inf"],
        ["generate", "x", "--top-p", "0"],
        ["generate", "x", "--max-tokens", str(10**13)],
        ["generate", "x", "--seed", str(10**20)],
        ["infill", "[MASK:2]", "--gpu-memory-utilization", "nan"],
        ["verify", "--gpu-memory-utilization", "5"],
        ["generate", "x", "--top-p", "much"],
        ["report", "sdar:8b", ""],
        ["report", "sdar:8b", "another"],
        ["doctor", "--dtype", "bf16"],
        ["serve", "--dtype", "float8"],
        ["serve", "--gpu-memory-utilization", "7"],
        ["serve", "-tp", "0"],
        ["serve", "--port"],
        ["serve", "--kv-cache-memory-bytes", "x"],
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


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("quantization_config", "fp8", "must be an object, got 'fp8'"),
        ("hidden_size", "x", "must be a whole number of at least 1, got 'x'"),
        ("n_layers", 0, "must be a whole number of at least 1, got 0"),
    ],
)
def test_a_broken_configuration(
    name: str,
    value: Any,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((Path(TINY) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert f"config.json: {name} {sentence}" in capsys.readouterr().err


def test_wrong_options_import_nothing_heavy() -> None:
    """Which is what makes them quick."""
    program = """if True:
        import sys; from dllm_plugin.commands import cli
        for line in sys.argv[1:]:
            assert cli.main(line.split()) == 2, line
            assert not {"torch", "vllm"} & set(sys.modules), line
    """
    command = [sys.executable, "-c", program, *LIGHT.splitlines()]
    subprocess.run(command, check=True)


NO_STRATEGY = "'dual_cache' does not fit sdar models, which attend causally"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serve", SDAR, "--strategy", "dual_cache"], NO_STRATEGY),
        (
            ["serve", SDAR, "--additional-config.dllm.strategy", "dual_cache"],
            NO_STRATEGY,
        ),
        (["serve", "--strategy", "causal_window"], "does not fit llada models"),
        (
            ["serve", "--strategy", "dual_cache", "--adaptive", "balanced"],
            "adaptive 'balanced' needs a strategy that attends from block to block",
        ),
        (["serve", SDAR, "--policy", "origin"], "policy 'origin' has no meaning"),
        (
            ["serve", SDAR, "--full-refresh-every", "8"],
            "full_refresh_every has no effect with strategy 'block_diffusion'",
        ),
        (["generate", "x", "--model", SDAR, "--strategy", "dual_cache"], NO_STRATEGY),
        (["infill", "x[MASK:1]", "--model", SDAR], "SDAR models attend causally from"),
        (["infill", "x[MASK:1]", "--model", LLADA22], "a gap needs a model that sees"),
        (
            ["infill", "[MASK:1]", "--model", SDAR, "--strategy", "dual_cache"],
            NO_STRATEGY,
        ),
        (["watch", "--model", SDAR, "--strategy", "dual_cache"], NO_STRATEGY),
        (
            ["eval", "--schedule", "8", "--model", SDAR, "--strategy", "dual_cache"],
            NO_STRATEGY,
        ),
        (["verify", SDAR, "--strategy", "dual_cache"], NO_STRATEGY),
        (["doctor", SDAR, "--strategy", "dual_cache"], NO_STRATEGY),
        (["bench", "step", SDAR, "--strategy", "dual_cache"], NO_STRATEGY),
        (["doctor", "--quantization", "fp8_perblock"], "did you mean fp8_per_block?"),
    ],
)
def test_what_a_family_does_not_have(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sentence before anything of vLLM's is imported, which takes seconds."""
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and sentence in printed.err
    assert printed.out == ""


def test_quantizations_are_those_of_vllm() -> None:
    from vllm.config.cache import CacheDType
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert options.words_of("--quantization") == tuple(QUANTIZATION_METHODS)
    assert options.words_of("--kv-cache-dtype") == get_args(CacheDType)
    options.check_word("--quantization", "fp8_per_block")


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
    assert error.startswith(f"diffuplug: error: `diffuplug {words[0]}` is an entry")
    assert "which is not installed here: run `pip install`" in error


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

    for module in (platforms, doctor):
        monkeypatch.setattr(module, "current_platform", UnspecifiedPlatform())
    assert cli.main(command) == 1
    written = capsys.readouterr()
    said = written.out if command == ["doctor"] else written.err
    assert "finds no device that it is built for: does `nvidia-smi` list a GPU?" in said
