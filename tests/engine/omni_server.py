"""`vllm serve` for the omni tests: any model, any options."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from processes import START_SECONDS, Server, end, environment, spawn


@contextlib.contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[Server]:
    """A server that is ready; its log is shown when it does not get there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    common = [f"--port={port}", "--host=127.0.0.1", "--enforce-eager", "--served-model-name=tiny"]
    with log.open("wb") as file:
        process = spawn(
            [*program, *common, *options], stdout=file, stderr=subprocess.STDOUT, env=environment()
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    deadline = time.monotonic() + START_SECONDS
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start:\n{log.read_text()[-6000:]}")
            time.sleep(0.2)
        yield server
    finally:
        end(process)
