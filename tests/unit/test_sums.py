"""The sums at the end of a test run."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sums

MAPPING = """
import mmap, os, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
forks = []
for _ in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        os.read(0, 1)
        os._exit(0)
    forks.append(pid)
print("mapped", flush=True)
os.read(0, 1)
for pid in forks:
    os.waitpid(pid, 0)
"""
TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("i", range(3))
def test_slow(i): pass

def test_quick(): pass
"""
CONFTEST = "import sums\ndef pytest_configure(config):\n    sums.register(config)\n"


@contextlib.contextmanager
def mapping(file: Path, forks: int) -> Iterator[None]:
    """A process that has a file in its memory, and forks of it; they end when their input does."""
    pipe, command = (
        subprocess.PIPE,
        [sys.executable, "-c", MAPPING, str(file), str(forks)],
    )
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"mapped\n"
        yield
        process.stdin.close()
        assert process.wait() == 0


def test_a_fork_is_no_import(tmp_path: Path) -> None:
    file = tmp_path / "vllm" / "_C.so"
    file.parent.mkdir()
    file.write_bytes(bytes(4096))
    found = sums.Sums()
    found.look()
    imports, forks = found.processes()  # this process may have imported vLLM
    with mapping(file, forks=2):
        found.look()
        assert found.processes() == (imports + 1, forks + 2)
        with mapping(file, forks=0):
            found.look()
    found.look()
    assert found.processes() == (imports + 2, forks + 2), "what has ended still counts"


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_tests_left_out_are_counted_once(
    workers: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *workers]
    done = subprocess.run(
        [*command, "-m", "not slow"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(sums.__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert re.search("^3 tests left out", done.stdout, re.MULTILINE), done.stdout
    assert "0 processes imported vLLM" in done.stdout
