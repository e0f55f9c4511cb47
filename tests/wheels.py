"""Build the wheel of this tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from documented import ROOT

NOT_SOURCE = (".*", "__pycache__", "*.egg-info", "build", "dist", "goldens", "reports")


def build_wheel(folder: Path) -> Path:
    """Build the wheel of a copy of the source tree in `folder`; return its path."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    cache = source / "dllm_plugin" / "default_model" / "__pycache__"
    cache.mkdir()
    (cache / "stale.cpython-311.pyc").touch()
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", program, str(folder)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = folder.glob("*.whl")
    return wheel
