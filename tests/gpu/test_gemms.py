"""GEMMs are not split (split-K) where our engines run. Needs a Hopper GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("where", "is_split"), [("plain", True), ("engine", False)])
def test_gemms(where, is_split):
    """In a process of its own: torch reads the setting once."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    environment.pop("CUBLAS_WORKSPACE_CONFIG", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("gemms.py")), where],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert kernels
    assert any("splitK" in name for name in kernels) == is_split
