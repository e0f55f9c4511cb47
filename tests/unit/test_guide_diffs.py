"""The diffs in the guides apply to the package as it is, and touch as little as the guides say."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from documented import ROOT
from guides import EXAMPLES, Example, contents, copy_package, examples, pages

LONGEST_PAGE = 115
NAMES = """
import json, dllm_plugin
from dllm_plugin.config.options import Options, REQUEST_FIELDS
from dllm_plugin.config.request.arguments import WITHHOLDING
from dllm_plugin.decoding.families import FAMILIES, FULL_ATTENTION, TAKEN_BY
from dllm_plugin.decoding.methods import METHODS
options = Options.from_user({"strategy": "window_cache", "policy": "nearest", "reach": 2})
methods = {f"{s} on {f}": [*row.policies] for (s, f), row in METHODS.items()}
known = [*REQUEST_FIELDS], [*FAMILIES], [*WITHHOLDING]
assert {(s, f) for s in TAKEN_BY for f in TAKEN_BY[s]} == set(METHODS)
full = {s for (s, _), row in METHODS.items() if row.full_attention}
assert full == set(FULL_ATTENTION) and "window_cache" in full
print(json.dumps([dllm_plugin.__file__, methods, *known]))
"""


FEATURE = """
import runpy, sys, pytest
from pathlib import Path
import dllm_plugin
root = Path(sys.argv[1])
assert Path(dllm_plugin.__file__).parents[1] == Path.cwd()
page = runpy.run_path(str(root / "scripts" / "options_page.py"))["page"]()
assert page == Path("docs/options.md").read_text(encoding="utf-8")
frozen = root / "tests/unit/test_config.py::test_public_surface_is_frozen"
methods = root / "tests" / "unit" / "test_methods.py"
tests = ["tests/unit/test_step_features.py", str(frozen), str(methods)]
sys.exit(pytest.main([*tests, "-q", "-c", str(root / "pyproject.toml"), "-p", "no:cacheprovider"]))
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all examples."""
    folder = copy_package(tmp_path_factory.mktemp("guides"))
    for example in examples():
        example.apply(folder)
    return folder


def test_each_page_has_its_examples() -> None:
    assert [(one.page, one.heading) for one in examples()] == sorted(
        EXAMPLES, key=_place
    )


def _place(key: tuple[str, str]) -> tuple[str, int]:
    return key[0], pages()[key[0]].index(f"## {key[1]}\n")


@pytest.mark.parametrize(
    "example", examples(), ids=lambda one: f"{one.page}: {one.heading}"
)
def test_an_example_touches_the_files_that_it_names(
    example: Example, tmp_path: Path
) -> None:
    """Two files for a policy, four with a number of its own, five for a feature with its test."""
    before = contents(copy_package(tmp_path))
    example.apply(tmp_path)
    after = contents(tmp_path)
    touched = {name for name in after if before.get(name) != after[name]}
    assert (
        touched == EXAMPLES[example.page, example.heading]
        and before.keys() <= after.keys()
    )
    assert len(example.diffs) == len(touched), "one diff for each file"


def test_the_changed_package_is_linted(changed: Path) -> None:
    """The examples follow the rules for code here."""
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    touched = set().union(*EXAMPLES.values())
    files = sorted(name for name in touched if name.endswith(".py"))
    config = ["--no-cache", "--config", str(ROOT / "pyproject.toml")]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [str(ruff), *command, *config, *files],
            cwd=changed,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_five_files_are_all_that_a_feature_needs(tmp_path: Path) -> None:
    """With them its test, the test of the order, frozen lists and the page of options pass."""
    folder = copy_package(tmp_path)
    examples()[0].apply(folder)
    assert len(EXAMPLES[examples()[0].page, "The diff"]) == 5
    done = subprocess.run(
        [sys.executable, "-c", FEATURE, str(ROOT)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_changed_package_knows_them(changed: Path) -> None:
    """Every table that lists strategies, policies, options or families has the new row."""
    done = subprocess.run(
        [sys.executable, "-c", NAMES],
        cwd=changed.parent,
        env=os.environ | {"PYTHONPATH": str(changed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file, methods, fields, architectures, withholding = json.loads(done.stdout)
    assert Path(file) == changed / "dllm_plugin" / "__init__.py"
    assert {
        "window_cache on llada",
        "window_cache on dream",
        "block_diffusion on toy",
    } < {*methods}
    holders = {
        policy: {method for method in methods if policy in methods[method]}
        for policy in ("rightmost", "nearest")
    }
    strategies = ("semi_autoregressive", "prefix_cache", "dual_cache", "window_cache")
    assert holders == {
        "rightmost": {
            f"{s} on {family}" for s in strategies for family in ("llada", "dream")
        }
        | {
            f"block_diffusion on {family}"
            for family in ("stable_diffcoder", "a2d", "nemotron")
        }
        | {"semi_autoregressive on a2d"},
        "nearest": {f"block_diffusion on {family}" for family in ("llada", "dream")},
    }
    assert "reach" in fields and "ToyForDiffusionLM" in architectures
    assert withholding == ["max_unmasked"]


@pytest.mark.parametrize("page", pages())
def test_a_page_is_short_and_its_places_exist(page: str) -> None:
    text = pages()[page]
    assert len(text.splitlines()) <= LONGEST_PAGE
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    for name in re.findall(r"`((?:[\w-]+/)+(?:\w+\.(?:py|md))?)`", prose):
        homes = [ROOT / name, ROOT / "dllm_plugin" / name]
        assert any(home.exists() for home in homes) or "NAME" in name, f"{page}: {name}"
