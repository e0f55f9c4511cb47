"""The diffs that docs/add-a-*.md link to, applied to a copy of the package."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from documented import ROOT

# What each example may touch: page and heading -> files.
EXAMPLES = {
    ("add-a-feature.md", "The diff"): {
        "dllm_plugin/config/request/arguments.py",
        "docs/options.md",
        "dllm_plugin/sampling/features/max_unmasked.py",
        "dllm_plugin/sampling/features/ordered.py",
        "tests/unit/test_step_features.py",
    },
    ("add-a-policy.md", "With the numbers that there are"): {
        "dllm_plugin/decoding/families.py",
        "dllm_plugin/decoding/policies.py",
    },
    ("add-a-policy.md", "With a number of its own"): {
        "dllm_plugin/config/options.py",
        "dllm_plugin/decoding/families.py",
        "dllm_plugin/decoding/policies.py",
        "dllm_plugin/state/request_table.py",
    },
    ("add-a-strategy.md", "The diff"): {
        "dllm_plugin/decoding/families.py",
        "dllm_plugin/decoding/full_attention.py",
        "dllm_plugin/decoding/methods.py",
    },
    ("add-a-model.md", "The diff"): {
        "dllm_plugin/decoding/families.py",
        "dllm_plugin/decoding/methods.py",
        "dllm_plugin/models/configs.py",
        "dllm_plugin/models/toy.py",
    },
}
WEIGHTS = "*.safetensors"


class Example(NamedTuple):
    """Store the diffs that a section of a page links to, one for each file."""

    page: str
    heading: str
    diffs: list[str]

    def apply(self, folder: Path) -> None:
        """Change a copy of the package that lies in `folder`."""
        # A folder inside of a checkout is none of that checkout's.
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
        for diff in self.diffs:
            done = subprocess.run(
                ["git", "apply", "--whitespace=error-all", "-"],
                input=diff,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, (
                f"{self.page}, {self.heading}: {done.stderr}\n{diff}"
            )


def pages() -> dict[str, str]:
    """Text of each guide, by its name."""
    paths = sorted((ROOT / "docs").glob("add-a-*.md"))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def examples() -> list[Example]:
    """All examples, in the order in which they are applied."""
    found = []
    for page, text in pages().items():
        for section in re.split(r"^## ", text, flags=re.M):
            for link in re.findall(r"\]\((guides/\w+\.diff)\)", section):
                text = (ROOT / "docs" / link).read_text(encoding="utf-8")
                diffs = re.split(r"^(?=--- )", text, flags=re.M)[1:]
                found.append(Example(page, section.partition("\n")[0], diffs))
    return found


def copy_package(folder: Path) -> Path:
    """Copy the package, without the bundled weights, and what else examples touch."""
    ignored = shutil.ignore_patterns("__pycache__", WEIGHTS)
    shutil.copytree(ROOT / "dllm_plugin", folder / "dllm_plugin", ignore=ignored)
    for name in set().union(*EXAMPLES.values()):
        if not name.startswith("dllm_plugin/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a copy, by its path."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found
