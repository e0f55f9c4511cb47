"""`make demo KEEP=1`: three right answers, one in JSON; a server that goes on, with its viewer."""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from documented import ROOT
from forked import PYTHON

from diffuplug_bench.word_problems.generator import ask_in_json, problems_of

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[str]:
    """Its path is short: vLLM makes sockets there, whose names have at most 107 characters."""
    with tempfile.TemporaryDirectory() as path:
        yield path


def test_the_demo_leaves_its_server_running(folder: str) -> None:
    done = subprocess.run(
        [PYTHON, str(ROOT / "scripts" / "demo.py"), "--keep"],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"TMPDIR": folder, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    kept = re.search(r"browser: (\S+/viewer)\n.* as process (\d+) ", done.stdout)
    assert done.returncode == 0 and kept, done.stderr[-3000:]
    process = int(kept[2])
    try:
        *free, last = problems_of(3)
        assert all(one.answer in done.stdout for one in free)
        found = re.search(r"^A: ({.*})$", done.stdout, re.MULTILINE)
        assert found and ask_in_json(last).is_right(found[1]), done.stdout
        assert "forwards" in done.stdout.splitlines()[-4]
        page = httpx.get(kept[1], timeout=60)
        assert page.status_code == 200 and 'id="replay"' in page.text
    finally:
        os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not is_alive(process), "kill ends it, as the demo says"


def is_alive(process: int) -> bool:
    """Whether a process runs that is no child of ours; one that nobody waits for has ended too."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
