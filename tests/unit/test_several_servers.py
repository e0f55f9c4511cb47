"""Ctrl-C of a process whose signal handlers are not ours, as vLLM's parent of several servers."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import signal, sys, time
from dllm_plugin.commands.interrupts import INTERRUPTED, Interrupts, end_now
signal.signal(signal.SIGINT, lambda *_: None)
watched = Interrupts(float(sys.argv[1]))
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    time.sleep(0.05)
assert watched.came
"""


@pytest.mark.parametrize(
    ("seconds", "runs", "presses", "status"),
    [(0.1, 60, 1, 130), (60, 60, 2, 130), (60, 5, 1, 0)],
    ids=["in time", "at the second", "by itself"],
)
def test_a_parent_ends(seconds: float, runs: float, presses: int, status: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(seconds), str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert process.wait(40) == status
