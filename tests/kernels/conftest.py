"""The process that runs Triton kernels on the CPU."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Interpreter:
    """The process that runs Triton kernels on the CPU."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="triton")
        self.errors = open(Path(self.folder.name) / "errors.txt", "w+")  # noqa: SIM115
        script = Path(__file__).with_name("triton_interpreter.py")
        pipe, command = subprocess.PIPE, [sys.executable, script]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # the other core runs tests
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=self.errors,
            text=True,
            env=one_thread,
        )

    def run(self, launches: list[Any]) -> list[Any]:
        """What the process answers to some launches, see `triton_interpreter.py`."""
        import torch

        files = [
            Path(self.folder.name) / name for name in ("launches.pt", "results.pt")
        ]
        torch.save(launches, files[0])
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*files, file=self.process.stdin, flush=True)
        answered = self.process.stdout.readline()
        self.errors.seek(0)
        assert answered, self.errors.read()
        return torch.load(files[1], weights_only=False)

    def close(self) -> None:
        """End the process."""
        self.process.kill()  # a farewell would take it seconds
        self.process.communicate()
        self.errors.close()
        self.folder.cleanup()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs Triton kernels on the CPU."""
    if not importlib.util.find_spec("triton"):
        pytest.skip("Triton is needed for its interpreter")
    started = Interpreter()
    yield started
    started.close()
