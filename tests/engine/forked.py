"""Start processes as forks of one that has imported vLLM; `template.py` is that one."""

import multiprocessing
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import stand_in

HERE = Path(__file__).parent
PYTHON = str(HERE / "stand_in")  # what to start in place of `sys.executable`
STARTED: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

# The workers of a test run share a template, and a fork that reads this file is of one already.
os.environ.setdefault(
    "STAND_IN_TEMPLATE", os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
)
os.environ.setdefault("STAND_IN_PYTHON", sys.executable)
# As `diffuplug serve` sets it, for what vLLM reads while it is imported must not differ in a fork.
os.environ.setdefault("VLLM_MAX_STOP_STRINGS", "64")
multiprocessing.set_executable(PYTHON)


def start() -> None:
    """Start the template, which imports while tests run; whoever comes second finds the first."""
    if STARTED:
        return
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {
        "OMP_NUM_THREADS": "1"
    }  # or libraries start threads, which no fork has
    process = subprocess.Popen(
        [sys.executable, str(HERE / "template.py"), PYTHON],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    connection = stand_in.connect(os.environ["STAND_IN_TEMPLATE"])
    stand_in.send(connection, {"descriptors": []}, [])
    STARTED.append((process, connection))


def stop() -> None:
    """Let the template go; it ends when nobody holds it any more."""
    while STARTED:
        process, connection = STARTED.pop()
        connection.close()
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
