"""A server that cannot start says why in its log and ends."""

import shutil
import subprocess
from pathlib import Path

import pytest
from engines import CHECKPOINTS
from processes import START_SECONDS, end, environment, serve_command, spawn
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("template")


def log_of(log: Path, command: list[str]) -> str:
    """What a server printed that ended by itself, with an error."""
    with log.open("wb") as file:
        process = spawn(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment()
        )
        try:
            assert process.wait(timeout=START_SECONDS) != 0
        finally:
            end(process)
    return log.read_text()


def test_a_misspelled_option_of_vllm(tmp_path: Path) -> None:
    """Found by vLLM's parser: one sentence, no usage, no traceback."""
    printed = log_of(tmp_path / "log", serve_command(0, "--max-num-seks=3"))
    assert "did you mean --max-num-seqs?" in printed.splitlines()[-1]
    assert "Traceback" not in printed and "usage:" not in printed


def test_missing_weight(tmp_path: Path) -> None:
    """Found in the process that loads the model."""
    model = shutil.copytree(CHECKPOINTS / "tiny-llada", tmp_path / "damaged")
    file, name = model / "model.safetensors", "model.transformer.blocks.1.v_proj.weight"
    save_file({k: v for k, v in load_file(file).items() if k != name}, file)
    printed = log_of(tmp_path / "log", serve_command(0, model=model))
    assert [
        line for line in printed.splitlines() if "ValueError: " in line and name in line
    ]
