"""The diffs that docs/add-a-*.md link to, applied to a copy of the package."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from documented import ROOT

# What each example may touch: page and heading -> files of the package.
EXAMPLES = {
    ("add-a-feature.md", "The diff"): {
        "config/request/arguments.py",
        "sampling/features/max_unmasked.py",
        "sampling/features/ordered.py",
    },
    ("add-a-policy.md", "With the numbers that there are"): {
        "decoding/families.py",
        "decoding/policies.py",
    },
    ("add-a-policy.md", "With a number of its own"): {
        "config/options.py",
        "decoding/families.py",
        "decoding/policies.py",
        "state/request_table.py",
    },
    ("add-a-strategy.md", "The diff"): {
        "decoding/families.py",
        "decoding/full_attention.py",
        "decoding/methods.py",
    },
    ("add-a-model.md", "The diff"): {
        "decoding/families.py",
        "decoding/methods.py",
        "models/configs.py",
        "models/toy.py",
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
    """Copy the package, without the bundled weights, into `folder`."""
    ignored = shutil.ignore_patterns("__pycache__", WEIGHTS)
    shutil.copytree(ROOT / "dllm_plugin", folder / "dllm_plugin", ignore=ignored)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every source file of a copy, by its path in the package."""
    package = folder / "dllm_plugin"
    return {
        str(path.relative_to(package)): path.read_bytes()
        for path in package.rglob("*.py")
    }
