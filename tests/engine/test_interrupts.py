"""Ctrl-C and SIGTERM, while commands start and while a server streams: all end soon, in order.

Commands that import vLLM meanwhile are Python's own processes; once it is imported, one `generate`
and one server are, too. The others are forks.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from engines import CHECKPOINTS
from forked import PYTHON
from processes import Server, end, environment, free_port, serve_command, serving, spawn
from streams import join, start_streams, wait_for_end

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

SOON = 3.0  # seconds that a command may take to end
SLACK = 3.0  # of a busy machine; what waits for nobody would take minutes
TINY = str(CHECKPOINTS / "tiny-llada")
ENDLESS = 4000
UNBOUND = (
    '--additional-config={"dllm": {"strategy": "d2f"}}',
    f"--kv-cache-memory-bytes={32 << 20}",
    '--hf-overrides={"max_sequence_length": 4096}',
    "--max-model-len=4096",
)
# What is written once vLLM is imported.
IMPORTED = ("loading the model", "EngineCore")
SENTENCE = "The server is ending and cut this request"


def front_end(server: Server) -> int:
    """Return the server's own process, which a stand-in may stand for."""
    found = re.search(r"\(APIServer pid=(\d+)\)", server.log.read_text())
    assert found
    return int(found[1])


def writers(log: Path) -> list[psutil.Process]:
    """Return the processes that have a log open: whoever it was given to, and all below."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(log) in [file.path for file in process.open_files()]:
                found.append(process)
    return found


def interrupted(
    process: subprocess.Popen[bytes], number: int, log: Path, one: int | None = None
) -> float:
    """Return the seconds from a signal to the end of a process; all below it have ended then.

    The signal comes from a terminal, to the whole group, or only to the process `one`.
    """
    assert writers(log)
    began = time.monotonic()
    if one is None:
        os.killpg(process.pid, number)
    else:
        os.kill(one, number)
    process.wait(timeout=60)
    took = time.monotonic() - began
    _, alive = psutil.wait_procs(writers(log), timeout=1)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], alive
    return took


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its path is short: vLLM makes sockets there, whose names have at most 107 characters."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def wait_for(log: Path, words: str, process: subprocess.Popen[bytes]) -> None:
    while words not in log.read_text():
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)


def interrupt_start(
    command: list[str],
    given: dict[str, str],
    log: Path,
    words: str,
    whole_group: bool,
    number: int = signal.SIGINT,
) -> None:
    """Interrupt a command once its log has some words; it ends soon, without a traceback."""
    with log.open("wb") as file:
        process = spawn(command, stdout=file, stderr=file, env=given)
    try:
        wait_for(log, words, process)
        one = None if whole_group else process.pid
        assert interrupted(process, number, log, one) < SOON + SLACK
    finally:
        end(process)
    assert process.returncode == 128 + number
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("whole_group", [False, True], ids=["process", "terminal"])
@pytest.mark.parametrize("phase", ["starting the engine", IMPORTED[0]])
def test_generate_starts(phase: str, whole_group: bool, folder: Path) -> None:
    fresh = not whole_group and phase != IMPORTED[0]
    python = sys.executable if fresh else PYTHON
    command = [python, "-m", "dllm_plugin.commands.cli", "generate", "x"]
    command += ["--model", TINY, "--gpu-memory-utilization=0.1"]
    given = environment(TMPDIR=str(folder))
    interrupt_start(command, given, folder / "log", phase, whole_group)
    assert not list(folder.glob("diffuplug-*.log"))


@pytest.mark.parametrize("whole_group", [False, True], ids=["process", "terminal"])
@pytest.mark.parametrize("words", ["diffuplug: starting vLLM", IMPORTED[1]])
def test_serve_starts(words: str, whole_group: bool, tmp_path: Path) -> None:
    forked = whole_group and words == IMPORTED[1]
    command = serve_command(free_port(), python=PYTHON if forked else sys.executable)
    level = "INFO" if words == IMPORTED[1] else "WARNING"
    given = environment(VLLM_LOGGING_LEVEL=level)
    interrupt_start(command, given, tmp_path / "log", words, whole_group)


@pytest.mark.parametrize("whole_group", [False, True], ids=["process", "group"])
def test_sigterm_while_the_engine_starts(whole_group: bool, tmp_path: Path) -> None:
    """The server waits for its engine then, and went on to wait after vLLM's own handler."""
    command = serve_command(free_port(), python=PYTHON)
    given = environment(VLLM_LOGGING_LEVEL="INFO")
    log = tmp_path / "log"
    interrupt_start(command, given, log, IMPORTED[1], whole_group, signal.SIGTERM)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "log", *UNBOUND) as server:
        yield server


def test_ctrl_c_of_an_idle_server(server: Server) -> None:
    took = interrupted(server.process, signal.SIGINT, server.log)
    assert took < SOON + SLACK
    assert server.process.returncode == 130
    assert "Traceback" not in server.log.read_text()


def test_ctrl_c_cuts_streams_with_a_sentence(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, *UNBOUND) as server:
        streams = start_streams(server.url, 4, ENDLESS)
        process, front = server.process, front_end(server)
        assert interrupted(process, signal.SIGINT, log, front) < SOON + SLACK
        join(streams, SOON)
        assert process.returncode == 130
    errors = [stream.error for stream in streams]
    assert all(SENTENCE in error for error in errors), errors
    assert "Traceback" not in log.read_text()


def test_a_second_ctrl_c_ends_at_once(server: Server) -> None:
    start_streams(server.url, 4, ENDLESS)
    front = front_end(server)
    os.kill(front, signal.SIGINT)
    time.sleep(0.5)
    assert interrupted(server.process, signal.SIGINT, server.log, front) < SOON
    assert server.process.returncode == 130


def test_sigterm_cuts_what_takes_longer_than_the_drain(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = (*UNBOUND, "--shutdown-timeout=3")
    with serving(log, *options) as server:
        streams = start_streams(server.url, 4, ENDLESS)
        front, began = front_end(server), time.monotonic()
        os.kill(front, signal.SIGTERM)
        join(streams, 30)
        took = max(stream.ended for stream in streams) - began
        assert 2 < took < 3 + SOON + SLACK
        errors = [stream.error for stream in streams]
        assert all(SENTENCE in error for error in errors), errors
        assert server.process.wait(timeout=60) == 0


def post_until_refused(url: str, replies: list[httpx.Response]) -> None:
    """Send short requests one after the other until the server takes no more."""
    body = {"prompt": [10], "max_tokens": 1}
    with httpx.Client(base_url=url, timeout=60) as client:
        while not replies or replies[-1].status_code == 200:
            try:
                replies.append(client.post("/v1/completions", json=body))
            except httpx.TransportError:  # the server has ended
                return


def test_sigterm_lets_streams_end_by_default(server: Server) -> None:
    # Made before: streams may end while a client reads its certificates.
    with httpx.Client(base_url=server.url, timeout=60) as client:
        streams = start_streams(server.url, 4, 150)
        replies: list[httpx.Response] = []
        arguments = (server.url, replies)
        beside = threading.Thread(target=post_until_refused, args=arguments)
        beside.start()
        os.kill(front_end(server), signal.SIGTERM)
        # A request that was taken may wait until the streams have ended; this one does not.
        wait_for_end(client)
        refused = client.post("/v1/completions", json={"prompt": [10], "max_tokens": 1})
    assert refused.status_code == 503 and "takes no new requests" in refused.text
    join(streams, 30)
    assert [(s.error, s.reason) for s in streams] == [("", "length")] * len(streams)
    beside.join(60)
    # Also the one that was being read when the signal came.
    assert {reply.status_code for reply in replies} <= {200, 503}
    assert server.process.wait(timeout=60) == 0
