"""The command line's surface, and what people see when they get it wrong."""

import argparse
import gc
import importlib.util
import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diffuplug_bench import cli as bench
from diffuplug_bench.eval import tables
from diffuplug_bench.eval.scores import progress_bar
from dllm_plugin import default_model
from dllm_plugin.commands import cli, models, parsers, phases, server
from dllm_plugin.commands.offline import (
    collecting_later,
    engine_options,
)
from dllm_plugin.commands.options import flag_of
from dllm_plugin.config.options import OPTIONS, REQUEST_FIELDS
from dllm_plugin.config.validation import Flag
from dllm_plugin.decoding.families import (
    FAMILIES,
    FULL_ATTENTION,
    LLADA,
    POLICIES_OF,
    POLICY_NAMES,
    SEVERAL,
    TAKEN_BY,
    surely_unread,
)
from dllm_plugin.decoding.methods import (
    METHODS,
    choose_method,
    methods_of,
)

DECODE = [
    "--allow-unverified",
    "--block-length",
    "--kv-cache-layout",
    "--lora-path",
    "--no-allow-unverified",
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
    "--head-quantization",
    "--kv-cache-dtype",
    "--quantization",
    "--compilation-config",
    "--compile-step",
    "--no-compile-step",
]
MEASURED += [
    "--commit-alone-from",
    "--kv-cache-layout",
    "--kv-cache-memory-bytes",
    *REFRESHES,
    "--pipeline-parallel-size",
    "--tensor-parallel-size",
    "--vocab-parallel",
    "--no-vocab-parallel",
]
UNVERIFIED = ["--allow-unverified", "--no-allow-unverified"]
MEASURED += ["--vs", "-h", *UNVERIFIED]
CHECKPOINT = {"--approximations", "--lora-path", "--model", "--threshold", "--vs"}
CHECKPOINT |= {*UNVERIFIED}
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
            "--profile",
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
        + ["--max-model-len", "--quantization", "--tensor-parallel-size"]
    ),
    "eval": sorted(
        [
            *DECODE,
            "--all",
            "--dtype",
            "--gpu-memory-utilization",
            "--help",
            "--json",
            "--limit",
            "--model",
            "--output",
        ]
        + ["--questions", "--refreshes", "--schedule", "--verbose", "-h", "-v"]
        + ["--head-quantization", "--kv-cache-dtype", "--quantization"]
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
            "--gpu-memory-utilization",
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
    found = surface(parsers.build_parser())
    found |= surface(bench.build_parser(), "bench")
    assert found | surface(tables.build_parser(), "eval") == COMMAND_OPTIONS


def test_bundled_model_is_the_default() -> None:
    args = parsers.build_parser().parse_args(["generate", "x"])
    options = engine_options(args)
    assert options["model"] == default_model.path()
    assert options["additional_config"] == {"dllm": {}}


@pytest.mark.parametrize("strategy", methods_of(LLADA))
def test_bundled_model_by_a_strategy(strategy: str) -> None:
    """It gets its adapter for the strategy that uses it in the table of methods."""
    args = parsers.build_parser().parse_args(["generate", "x", "--strategy", strategy])
    dllm = {"strategy": strategy}
    method, _ = choose_method(strategy, LLADA, adapted=True)
    if method.uses_adapter:
        dllm["lora_path"] = default_model.adapter_path()
    assert engine_options(args)["additional_config"] == {"dllm": dllm}


def test_names_that_are_known_without_torch() -> None:
    """They are those of the table of methods; it may have new strategies and policies besides."""
    taken = {(name, family) for name in TAKEN_BY for family in TAKEN_BY[name]}
    assert taken == set(METHODS)
    rows = METHODS.values()
    assert {name for row in rows for name in row.policies} == set(POLICY_NAMES)
    full = {name for (name, _), method in METHODS.items() if method.full_attention}
    assert full == set(FULL_ATTENTION)
    families = {family.name: family for family in FAMILIES.values()}
    named = {policy for policies in POLICIES_OF.values() for policy in policies}
    for (strategy, name), row in METHODS.items():
        known = POLICIES_OF.get((strategy, name), POLICIES_OF.get((strategy, "")))
        assert known in (
            None,
            tuple(policy for policy in row.policies if policy in named),
        )
        unread = set(surely_unread(strategy, families[name]))
        assert unread == set(REQUEST_FIELDS) - row.options
        one_at_a_time = row.inserts or row.exact_end or row.causal
        assert row.full_attention or one_at_a_time == (name not in SEVERAL)
    assert {strategy for strategy, _ in POLICIES_OF} <= set(TAKEN_BY)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["infill", "no gap"], "text has no gap"),
        (["infill", "--strategy", "d2f", "[MASK:3]"], "Use strategy dual_cache"),
        (["serve", "--strategy", "dualcache"], "did you mean dual_cache?"),
        (["watch", "--policy", "treshold", "x"], "did you mean threshold?"),
        (
            ["watch", "--max-tokens", "5000"],
            "is longer than the context of 1024 tokens",
        ),
        (["generate", "--max-tokens", "5000", "x"], "--max-tokens 5000 is longer than"),
        (["eval", "--schedule", "8", "--policy", "x"], "policy 'x' is unknown"),
        (["serve", "--strategy", "introspective"], "does not fit llada models"),
        (["generate", "--strategy", "causal_window", "x"], "does not fit"),
        (["verify", "--strategy", "self_speculation"], "does not fit"),
        (["bench", "host", "--strategy", "introspective"], "does not fit"),
        (["generate", "--regex", "a(?=b)", "x"], "--regex has '(?=', which looks at"),
    ],
)
def test_wrong_words_are_refused_without_torch(
    arguments: list[str], words: str
) -> None:
    """The import of torch may take longer than the sentence may."""
    program = "import sys; sys.modules['torch'] = None\n"
    program += "from dllm_plugin.commands import cli\nsys.exit(cli.main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


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
        assert not gc.isenabled() and gc.get_freeze_count()
    finally:
        gc.enable()
        gc.unfreeze()


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
        assert progress_bar(screen, "decoding") is False
        screen.end("done")
    shown = [line.partition("] ")[2] for line in err.getvalue().splitlines()]
    assert shown == [phases.FIRST, *phases.MARKERS.values(), "decoding", "done"]


def test_a_rope_of_another_kind_is_left_to_the_engine() -> None:
    models.check_fits(
        "canvas_length",
        9,
        {"max_position_embeddings": 8, "rope_parameters": {"factor": 2}},
    )
    with pytest.raises(
        ValueError, match="canvas_length 9 is longer than the context of 8"
    ):
        models.check_fits(
            "canvas_length", 9, {"max_position_embeddings": 8, "rope_scaling": 5}
        )
