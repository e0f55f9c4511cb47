"""Real servers and scripts in processes of their own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from engines import CHECKPOINTS

HERE = Path(__file__).parent
CORES = os.sched_getaffinity(0)  # an engine in this process may bind itself to one of them
START_SECONDS = 180
KILLED_SOON = {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1"}  # vLLM's CPU workers wait for it
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 16 << 20,
}


def environment(**changes: str) -> dict[str, str]:
    """Variables of a process that runs vLLM as users do: with an engine process of its own."""
    ours = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    return os.environ | ours | changes


@dataclass
class Server:
    """A running ``vllm serve``."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """POST to ``/v1/...``."""
        return httpx.post(f"{self.url}/v1/{path}", json={"model": "tiny"} | body, timeout=120)

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        """A completion, greedy unless said otherwise."""
        response = self.post("completions", {"prompt": prompt, "temperature": 0} | options)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of a streamed answer."""
        body = {"model": "tiny", "temperature": 0, "stream": True} | body
        url = f"{self.url}/v1/{path}"
        with httpx.stream("POST", url, json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def metrics(self, name: str) -> dict[str, float]:
        """Values of a metric by engine."""
        values = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith(f"{name}{{"):
                engine = line.split('engine="')[1].split('"')[0]
                values[engine] = float(line.rsplit(" ", 1)[1])
        return values


def serve_command(port: int, *options: str, model: Path = CHECKPOINTS / "tiny-llada") -> list[str]:
    """``diffuplug serve``, which becomes ``vllm serve``."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    return [
        *(sys.executable, "-m", "dllm_plugin.commands.cli", "serve", str(model)),
        *("--host=127.0.0.1", f"--port={port}", "--enforce-eager"),
        *("--served-model-name=tiny", *flags, *options),
    ]


def spawn(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process, in a session of its own, that may use every core."""
    return subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, CORES),
        **options,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def serving(log: Path, *options: str, **variables: str) -> Iterator[Server]:
    """A server that is ready; its log is shown when it does not get there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, deadline = serve_command(port, *options), time.monotonic() + START_SECONDS
    with log.open("wb") as file:
        process = spawn(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment(**variables)
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        while not _healthy(server):
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start:\n{log.read_text()[-6000:]}")
            time.sleep(0.2)
        yield server
    finally:
        end(process)


def _healthy(server: Server) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    return False


def offline(*wishes: dict[str, Any], **variables: str) -> list[list[list[int]]]:
    """Run ``offline_script.py``: tokens of each prompt for each wish, engine after engine."""
    process = spawn(
        [sys.executable, str(HERE / "offline_script.py"), json.dumps(wishes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(**variables),
    )
    try:
        output = process.communicate(timeout=START_SECONDS * len(wishes))[0].decode()
    finally:
        end(process)
    assert process.returncode == 0, output[-6000:]
    [line] = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return list(json.loads(line.removeprefix("RESULT ")))
