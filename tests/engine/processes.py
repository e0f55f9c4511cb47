"""Real servers and scripts in processes of their own."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import httpx
from engines import CHECKPOINTS
from forked import PYTHON

HERE = Path(__file__).parent
CORES = os.sched_getaffinity(
    0
)  # an engine in this process may bind itself to one of them
START_SECONDS = 420  # several front ends import vLLM at the same time on two cores
STARTS: list[
    float
] = []  # seconds of each server's start in this process, for `sums.py`
KILLED_SOON = {
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1"
}  # vLLM's CPU workers wait for it
# The engine's process computes, too, as with one GPU. Between two processes vLLM keeps both awake
# for a second after each message, which costs other tests their core.
INSIDE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
KEY, PROXY = "secret", "/behind/a/proxy"
KEYED = (f"--api-key={KEY}", f"--root-path={PROXY}")  # for `serving`
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
    headers: dict[str, str] = field(default_factory=dict)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """POST to ``/v1/...``."""
        url, json = f"{self.url}/v1/{path}", {"model": "tiny"} | body
        return httpx.post(url, json=json, headers=self.headers, timeout=120)

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        """A completion, greedy unless said otherwise."""
        response = self.post(
            "completions", {"prompt": prompt, "temperature": 0} | options
        )
        assert response.status_code == 200, response.text
        return dict(response.json())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of a streamed answer."""
        body = {"model": "tiny", "temperature": 0, "stream": True} | body
        url = f"{self.url}/v1/{path}"
        asked = httpx.stream("POST", url, json=body, headers=self.headers, timeout=120)
        with asked as response:
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


def serve_command(
    port: int,
    *options: str,
    model: Path = CHECKPOINTS / "tiny-llada",
    python: str = PYTHON,
) -> list[str]:
    """``diffuplug serve``, which becomes ``vllm serve``."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    return [
        *(python, "-m", "dllm_plugin.commands.cli", "serve", str(model)),
        *("--host=127.0.0.1", f"--port={port}", "--enforce-eager"),
        *("--served-model-name=tiny", *flags, *options),
    ]


def spawn(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process, in a session of its own, that may use every core."""
    if command[0] == PYTHON:
        forked.start()
    return subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=_as_from_a_terminal,
        **options,
    )


def _as_from_a_terminal() -> None:
    """Use every core and heed Ctrl-C, which a test run in the background ignores."""
    os.sched_setaffinity(0, CORES)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port that nobody listens on, nor is given as that of an outgoing connection meanwhile."""
    lowest_given = int(
        Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    )
    while True:
        port = random.SystemRandom().randrange(10_000, lowest_given)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def serving(
    log: Path,
    *options: str,
    model: Path = CHECKPOINTS / "tiny-llada",
    python: str = PYTHON,
    port: int = 0,
    **variables: str,
) -> Iterator[Server]:
    """``diffuplug serve``, ready; port 0 is any one."""
    port = port or free_port()
    command = serve_command(port, *options, model=model, python=python)
    with ready(command, port, log, **variables) as server:
        yield server


@contextlib.contextmanager
def ready(
    command: list[str], port: int, log: Path, **variables: str
) -> Iterator[Server]:
    """A server that is ready; its log is shown when it does not get there."""
    began = time.monotonic()
    with log.open("wb") as file:
        process = spawn(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment(**variables)
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    if KEYED[0] in command:
        server.headers["Authorization"] = f"Bearer {KEY}"
    try:
        while not _healthy(server):
            ended = process.poll() is not None
            if ended or time.monotonic() - began > START_SECONDS:
                raise AssertionError(
                    f"the server did not start:\n{log.read_text()[-6000:]}"
                )
            time.sleep(0.2)
        STARTS.append(time.monotonic() - began)
        yield server
    finally:
        end(process)


def _healthy(server: Server) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    return False


def result_of(script: str, *arguments: str, seconds: float, **options: Any) -> Any:
    """What a script of this folder writes, as JSON, to the file that it is told last.

    Not to its output: other processes of vLLM's write there at the same time.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        process = spawn(
            [PYTHON, str(HERE / script), *arguments, file.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )
        try:
            output = process.communicate(timeout=seconds)[0].decode()
        finally:
            end(process)
        assert process.returncode == 0, output[-6000:]
        return json.load(file)


def offline(*wishes: dict[str, Any], **variables: str) -> list[list[list[int]]]:
    """Run ``offline_script.py``: tokens of each prompt for each wish, engine after engine."""
    seconds = START_SECONDS * len(wishes)
    env = environment(**variables)
    return list(
        result_of("offline_script.py", json.dumps(wishes), seconds=seconds, env=env)
    )
