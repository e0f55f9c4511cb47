"""Several nodes of one server, as processes of this host that talk over its loopback."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import MIXED, Job
from processes import (
    KILLED_SOON,
    START_SECONDS,
    Server,
    end,
    environment,
    free_port,
    serve_command,
    serving,
    spawn,
)
from streams import join, start_streams
from test_faults import END_SECONDS, ENDLESS, ERROR_SECONDS, UNBOUND

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

D2F = '--additional-config={"dllm": {"strategy": "d2f"}}'
ON_LOOPBACK = KILLED_SOON | {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextlib.contextmanager
def started(log: Path, *options: str, **given: str) -> Iterator[Server]:
    """Start `diffuplug serve`; does not wait until it is ready."""
    command = serve_command(free_port(), *options)
    with log.open("wb") as file:
        process = spawn(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(**ON_LOOPBACK, **given),
        )
    try:
        yield Server("", log, process)
    finally:
        end(process)


def nodes(*options: str) -> tuple[list[str], list[str]]:
    """Return the options of two nodes of one rank each."""
    joined = ["--nnodes=2", "--tensor-parallel-size=2", "--master-addr=127.0.0.1"]
    joined += [f"--master-port={free_port()}", *options]
    return [*joined, "--node-rank=0"], [*joined, "--node-rank=1", "--headless"]


def ask(server: Server, one: Job) -> list[int]:
    """Return the tokens of a request."""
    numbers = {f"dllm_{name}": value for name, value in one.numbers}
    answer = server.complete(
        list(one.prompt),
        max_tokens=one.max_tokens,
        ignore_eos=True,
        return_token_ids=True,
        vllm_xargs=numbers | {"dllm_block_length": one.block_length},
    )
    return list(answer["choices"][0]["token_ids"])


def ask_all(server: Server, jobs: list[Job]) -> list[list[int]]:
    """Return the tokens of requests that run together."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda one: ask(server, one), jobs))


def test_two_nodes(tmp_path: Path) -> None:
    """Two nodes give the tokens of one; if one dies, clients get errors and both end."""
    first, second = nodes(*UNBOUND)
    with (
        started(tmp_path / "second", *second) as other,
        serving(tmp_path / "first", *first, **ON_LOOPBACK) as server,
    ):
        expected = [one.expected("llada", 4096)[0] for one in MIXED]
        assert ask_all(server, list(MIXED)) == expected
        [rank] = set(re.findall(r"\(Worker_TP1 pid=(\d+)\)", other.log.read_text()))
        streams = start_streams(server.url, 4, ENDLESS)
        os.kill(int(rank), signal.SIGKILL)
        join(streams, ERROR_SECONDS)
        assert all(stream.error for stream in streams)
        assert server.process.wait(timeout=END_SECONDS) == 1
        assert other.process.wait(timeout=END_SECONDS) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--threshold=0.7", "threshold 0.7, rank 0 with 0.9: start"),
        ("VLLM_PP_LAYER_PARTITION=1,2", "VLLM_PP_LAYER_PARTITION '1,2', rank 0 with"),
    ],
)
def test_nodes_with_different_options(
    options: str, sentence: str, tmp_path: Path
) -> None:
    """One sentence on both nodes, which end before they load weights."""
    first, second = nodes(D2F, "--tensor-parallel-size=1", "--pipeline-parallel-size=2")
    given = {}
    if options.startswith("--"):
        second.append(options)
    else:
        name, value = options.split("=")
        given[name] = value
    began = time.monotonic()
    with (
        started(tmp_path / "second", *second, **given) as other,
        started(tmp_path / "first", *first) as server,
    ):
        for node in (server, other):
            assert node.process.wait(timeout=START_SECONDS) not in (0, None)
            lines = node.log.read_text().splitlines()
            wanted = f"ValueError: rank 1 was started with {sentence}"
            assert any(wanted in line for line in lines)
    assert time.monotonic() - began < START_SECONDS


def replicas() -> tuple[list[str], list[str]]:
    """Return the options of two nodes of one replica each."""
    both = [*UNBOUND, "--data-parallel-size=2", "--data-parallel-size-local=1"]
    both += ["--data-parallel-address=127.0.0.1"]
    both += [f"--data-parallel-rpc-port={free_port()}"]
    second = [*both, "--data-parallel-start-rank=1", "--headless"]
    return [*both, "--api-server-count=1"], second


def test_replicas_on_two_nodes(tmp_path: Path) -> None:
    """Both replicas serve, and both nodes end with status 0 when they are asked to."""
    first, second = replicas()
    jobs = [*MIXED, *MIXED]
    with (
        started(tmp_path / "second", *second) as other,
        serving(tmp_path / "first", *first, **ON_LOOPBACK) as server,
    ):
        assert ask_all(server, jobs) == [one.expected("llada", 4096)[0] for one in jobs]
        steps = server.metrics("vllm:diffusion_num_denoising_steps_total")
        assert sorted(steps) == ["0", "1"] and min(steps.values()) > 0
        for node in (server, other):
            node.process.send_signal(signal.SIGTERM)
            assert node.process.wait(timeout=END_SECONDS) == 0


def test_replicas_with_different_options(tmp_path: Path) -> None:
    """The node that serves ends with one sentence before it takes requests."""
    first, second = replicas()
    with (
        started(tmp_path / "second", *second, "--threshold=0.7"),
        started(tmp_path / "first", *first) as server,
    ):
        assert server.process.wait(timeout=START_SECONDS) == 1
        sentence = "replica 1 was started with threshold 0.7, this server with 0.9"
        assert f"diffuplug: error: {sentence}" in server.log.read_text()


def test_a_replica_of_another_node_is_killed(tmp_path: Path) -> None:
    """Nobody sees it but by its silence: clients get errors, and the server ends."""
    first, second = replicas()
    soon = ON_LOOPBACK | {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "5"}
    with (
        started(tmp_path / "second", *second) as other,
        serving(tmp_path / "first", *first, **soon) as server,
    ):
        streams = start_streams(server.url, 8, ENDLESS)
        [replica] = set(
            re.findall(r"\(EngineCore_DP1 pid=(\d+)\)", other.log.read_text())
        )
        os.kill(int(replica), signal.SIGKILL)
        join(streams, END_SECONDS)
        assert all(stream.error for stream in streams)
        assert server.process.wait(timeout=END_SECONDS) == 1
        sentence = "the engine of another host has died"
        assert sentence in server.log.read_text()
        assert other.process.wait(timeout=END_SECONDS) == 1
