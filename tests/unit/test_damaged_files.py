"""What people see when files of a checkpoint are damaged or missing: one sentence."""

import json
import shutil
from pathlib import Path

import pytest
from command_lines import TINY

from dllm_plugin.commands import cli


def test_a_tokenizer_that_was_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(TINY) / "config.json", tmp_path)
    whole = (Path(TINY) / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert "tokenizer.json is truncated or damaged" in capsys.readouterr().err


BY_INDEX = json.dumps({"weight_map": {"a": "a.safetensors"}})
WRONG_WEIGHTS: dict[str, tuple[str, str | None, str]] = {
    "folder": ("model.safetensors", None, "model.safetensors': it is a folder."),
    "empty": ("model.safetensors", "", "truncated or damaged (Error"),
    "pointer": ("model.safetensors", "version 1\noid a\n", "truncated or damaged"),
    "absent": (
        "model.safetensors.index.json",
        BY_INDEX,
        "lacks 'a.safetensors', which",
    ),
    "no index": ("model.safetensors.index.json", "[", "lists no files of weights"),
    "no map": ("model.safetensors.index.json", "[]", "lists no files of weights"),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_wrong_files_of_weights(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text, sentence = WRONG_WEIGHTS[name]
    for kept in ("config.json", "model.safetensors"):
        shutil.copy(Path(TINY) / kept, tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    if text is None:
        (tmp_path / file).mkdir()
    else:
        (tmp_path / file).write_text(text)
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_without_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(TINY) / "config.json", tmp_path)
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "holds no weights" in capsys.readouterr().err
