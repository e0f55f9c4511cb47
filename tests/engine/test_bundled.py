"""The bundled model through the real engine, as README and the command line use it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from documented import readme_example


def run(*command: str) -> str:
    """Standard output of a command that has to succeed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_readme_example(tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(readme_example())
    output = run(sys.executable, str(program))
    assert re.search(r"#### 29\n", output)
    assert re.search(r"^\d+ tokens in \d+ forwards$", output, re.MULTILINE)


def test_accuracy_and_tokens_per_forward() -> None:
    output = run(sys.executable, "-m", "dllm_plugin.cli", "eval", "--limit", "24")
    rows = json.loads(output.strip().splitlines()[-1])["rows"]
    base, d2f = rows["one token per step"], rows["D2F, threshold 0.9"]
    assert base["accuracy"] >= 0.95 and base["tokens_per_forward"] <= 1
    assert d2f["accuracy"] >= 0.95 and d2f["tokens_per_forward"] >= 3
