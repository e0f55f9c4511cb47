"""Commands whose output is closed, cut off or interrupted: nothing is lost, nothing is left."""

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from vllm.utils import ompmultiprocessing

from dllm_plugin.commands import phases

# `generate` without an engine: a child writes to the log as vLLM does, then comes the answer.
PROGRAM = """
import os, subprocess, sys, time
from dllm_plugin.commands import cli, generate, phases

def run(args):
    with phases.screen(args.verbose) as shown:
        subprocess.run("echo words of vLLM; echo ValueError: no memory >&2", shell=True)
        if args.prompt == "fail":
            raise ValueError("it did not start")
        if args.prompt == "break":
            raise BrokenPipeError(32, "of an engine")
        shown.end("ready")
        if args.prompt == "wait":
            time.sleep(60)
        shown.out.write("the answer\\n")
        shown.out.flush()
    return 0

generate.run = run
sys.exit(cli.main())
"""


class Started:
    """The program, and the folder where its log lies."""

    def __init__(self, folder: Path, prompt: str, **streams: Any) -> None:
        self.folder = folder
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "generate", prompt],
            env=os.environ | {"TMPDIR": str(folder)},
            **streams,
        )

    def logs(self) -> list[Path]:
        return list(self.folder.glob("diffuplug-*.log"))

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, (out or b"").decode(), (err or b"").decode()


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return lambda prompt="x", **streams: Started(tmp_path, prompt, **streams)


def read_line(stream: IO[bytes] | None) -> bytes:
    assert stream is not None
    return stream.readline()


def test_output_goes_where_it_belongs(start: Start) -> None:
    started = start()
    status, out, err = started.end()
    assert (status, out) == (0, "the answer\n") and "words of vLLM" not in err
    assert started.logs() == []


def test_a_failure_names_the_log(start: Start) -> None:
    started = start("fail")
    status, out, err = started.end()
    (log,) = started.logs()
    assert (status, out) == (2, "")
    assert err.splitlines()[-2:] == [
        f"diffuplug: vLLM's log: {log}",
        "diffuplug: error: it did not start",
    ]
    assert log.read_text() == "words of vLLM\nValueError: no memory\n"


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_closed_descriptors(closed: tuple[int, ...], start: Start) -> None:
    """What is opened later must not take their numbers and get the answer or the log."""

    def close() -> None:
        for number in closed:
            os.close(number)

    started = start(preexec_fn=close)
    status, out, err = started.end()
    assert status == 0 and started.logs() == []
    assert out == ("" if 1 in closed else "the answer\n")
    assert ("ready" in err) is (2 not in closed)


def test_a_reader_that_has_gone(start: Start) -> None:
    """As `| head -0` leaves it: no complaint, no log, the status that a shell gives SIGPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    started = start(stdout=writing)
    os.close(writing)
    status, _, err = started.end()
    assert status == 128 + signal.SIGPIPE
    assert "Broken pipe" not in err and "Traceback" not in err and "log" not in err
    assert started.logs() == []


def test_a_pipe_that_breaks_inside_is_a_failure(start: Start) -> None:
    started = start("break")
    status, _, err = started.end()
    (log,) = started.logs()
    assert status == 1 and f"vLLM's log: {log}" in err
    assert err.splitlines()[-1] == "diffuplug: error: [Errno 32] of an engine"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command(number: signal.Signals, start: Start) -> None:
    # A shell lets what it starts in the background ignore the signal.
    started = start(
        "wait", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    while b"ready" not in read_line(started.process.stderr):
        assert started.process.poll() is None
    started.process.send_signal(number)
    status, out, err = started.end()
    assert (
        (status, out) == (128 + number, "")
        and "Traceback" not in err
        and "log" not in err
    )
    assert started.logs() == []


def test_more_ranks_than_numa_nodes() -> None:
    """The variable that helps is named, whether or not there is a log."""
    words = inspect.getsource(ompmultiprocessing)
    assert phases.BINDING in words and '"nobind"' in words
    error = AssertionError(f"{phases.BINDING} to bind threads. Decrease DP/TP/PP.")
    why = phases.why_not_started(error, None)
    assert why.endswith("TP/PP. VLLM_CPU_OMP_THREADS_BIND=nobind binds none.)")
    assert phases.why_not_started(RuntimeError("x"), None).endswith("cause is above")


# `serve` without an engine: a child writes as vLLM does, with an error amid the lines.
START = """
import subprocess, sys
from dllm_plugin.commands import interrupts, phases

try:
    with phases.start_log(True):
        print("a line before", flush=True)
        if sys.argv[1] != "quiet":
            subprocess.run("echo ERROR ValueError: no memory >&2; echo more >&2", shell=True)
        if sys.argv[1] == "fail":
            raise RuntimeError("initialization failed")
        phases.end_start()
        print("ready", file=sys.stderr, flush=True)
except interrupts.StartError as error:
    print(error, file=sys.stderr)
"""


@pytest.mark.parametrize("way", ["quiet", "recovers", "fail"])
def test_the_log_of_a_start(way: str, tmp_path: Path) -> None:
    """It is passed on up to an error; what follows goes to a file if the start fails."""
    done = subprocess.run(
        [sys.executable, "-c", START, way],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    kept = "ERROR ValueError: no memory\nmore\n"
    assert done.stdout == "a line before\n"
    if way != "fail":
        assert done.stderr == (kept if way == "recovers" else "") + "ready\n"
        assert not [*tmp_path.iterdir()]
        return
    (log,) = tmp_path.iterdir()
    assert log.read_text() == kept
    assert done.stderr.splitlines() == [
        f"diffuplug: vLLM's log: {log}",
        "the engine did not start (cause: no memory)",
    ]
