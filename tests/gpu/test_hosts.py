"""Nodes of one server on one host's GPUs, by NCCL: the reference's tokens in float32.

NCCL takes the two nodes for two hosts, so they talk by sockets, not by memory that they share.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import recorded
import torch

START_SECONDS = 240
LOOPBACK = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}
OPTIONS = [
    *("--host=127.0.0.1", "--served-model-name=tiny", "--dtype=float32"),
    *("--enforce-eager", "--max-model-len=512", "--max-num-seqs=16"),
    *("--kv-cache-memory-bytes=67108864", "--gpu-memory-utilization=0.05"),
    *("--attention-backend=TRITON_ATTN", "--disable-custom-all-reduce"),
    '--additional-config={"dllm": {"strategy": "d2f"}}',
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def visible(first: int, count: int) -> str:
    """Names of GPUs for CUDA_VISIBLE_DEVICES, among those that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(first + count)]
    return ",".join(names[first : first + count])


@contextlib.contextmanager
def process(log: Path, command: list[str], **variables: str) -> Iterator[Any]:
    """A process in a session of its own, which is ended with its children."""
    with log.open("wb") as file:
        started = subprocess.Popen(
            [sys.executable, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | LOOPBACK | variables,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        for how, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(seconds)


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """The status and the text of an answer, or None while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    text = json.dumps(body) if body else None
    header = {"Content-Type": "application/json"}
    with contextlib.suppress(ConnectionError):
        connection.request("POST" if body else "GET", path, text, header)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    return None


def tokens(port: int, case: dict[str, Any]) -> list[int]:
    wish = recorded.d2f_params(case)
    body = {
        "model": "tiny",
        "prompt": case["prompt_ids"],
        "temperature": 0,
        "max_tokens": wish.max_tokens,
        "ignore_eos": True,
        "stop_token_ids": [case["eos_id"]],
        "return_token_ids": True,
        "vllm_xargs": wish.extra_args,
    }
    status, text = ask(port, "/v1/completions", body)
    assert status == 200, text
    return list(json.loads(text)["choices"][0]["token_ids"])


def check(folder: Path, name: str, gpus: int, both: list[str], second: list[str]):
    """Start two nodes of `gpus` each, compare recorded decodes, end both."""
    golden = json.loads((recorded.GOLDENS / f"{name}.json").read_text())
    model, port = str(recorded.GOLDENS / golden["checkpoint"]), free_port()
    serve = ["-m", "dllm_plugin.commands.cli", "serve", model, *OPTIONS, *both]
    commands = [[*serve, f"--port={port}"], [*serve, *second, "--headless"]]
    if "--nnodes=2" in both:
        commands[0].append("--node-rank=0")
    logs = [folder / "first", folder / "second"]
    with contextlib.ExitStack() as stack:
        nodes = []
        for i, (log, command) in enumerate(zip(logs, commands, strict=True)):
            own = {"CUDA_VISIBLE_DEVICES": visible(gpus * i, gpus)}
            own["NCCL_HOSTID"] = f"node-{i}"
            nodes.append(stack.enter_context(process(log, command, **own)))
        began = time.monotonic()
        while (ask(port, "/health") or [0])[0] != 200:
            ended = [node.poll() for node in nodes] != [None, None]
            if ended or time.monotonic() - began > START_SECONDS:
                texts = [log.read_text()[-5000:] for log in logs]
                raise AssertionError("not ready:\n" + "\n=====\n".join(texts))
            time.sleep(0.5)
        print(f"ready after {time.monotonic() - began:.0f} s")
        cases = golden["cases"]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda case: tokens(port, case), cases))
    assert found == [recorded.d2f_tokens(case) for case in cases]


RANKS = {
    "ranks": ("d2f_llada", 1, ["--tensor-parallel-size=2"]),
    "stages": ("d2f_dream", 1, ["--pipeline-parallel-size=2"]),
    "four-ranks": ("d2f_llada", 2, ["--tensor-parallel-size=4"]),
    "stages-of-ranks": (
        "d2f_dream",
        2,
        ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"],
    ),
}


@pytest.mark.parametrize("name", RANKS)
def test_two_nodes(name: str, tmp_path: Path) -> None:
    golden, gpus, options = RANKS[name]
    if torch.cuda.device_count() < 2 * gpus:
        pytest.skip(f"needs {2 * gpus} GPUs")
    both = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    check(tmp_path, golden, gpus, [*both, *options], ["--node-rank=1"])


def test_replicas_on_two_nodes(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    both = ["--data-parallel-size=2", "--data-parallel-size-local=1"]
    both += ["--data-parallel-address=127.0.0.1"]
    both += [f"--data-parallel-rpc-port={free_port()}"]
    check(tmp_path, "d2f_llada", 1, both, ["--data-parallel-start-rank=1"])


def ray_node(gpu: int, *options: str) -> None:
    """Start a node of a Ray cluster that has one GPU."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-gpus=1"]
    command += ["--num-cpus=4", f"--object-store-memory={200 << 20}"]
    own = {"CUDA_VISIBLE_DEVICES": visible(gpu, 1), "NCCL_HOSTID": f"node-{gpu}"}
    own |= {"RAY_USAGE_STATS_ENABLED": "0"}
    environment = os.environ | LOOPBACK | own
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_two_nodes_of_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    port = free_port()
    address = f"127.0.0.1:{port}"
    head = ["--head", "--node-ip-address=127.0.0.1", f"--port={port}"]
    ray_node(0, *head, "--include-dashboard=false")
    ray_node(1, f"--address={address}", "--node-ip-address=127.0.0.1")
    script = Path(__file__).with_name("ray_decodes.py")
    log = tmp_path / "log"
    try:
        with process(log, [str(script)], RAY_ADDRESS=address) as driver:
            driver.wait(START_SECONDS)
            assert driver.returncode == 0, log.read_text()[-8000:]
        assert "RayWorkerProc" in log.read_text()
    finally:
        stop = [sys.executable, "-m", "ray.scripts.scripts", "stop", "--force"]
        subprocess.run(stop, capture_output=True, check=False)
