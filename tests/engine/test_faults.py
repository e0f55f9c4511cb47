"""Processes that are killed or asked to end, clients that vanish: nobody waits, nothing is left."""

import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engines import EngineRoom
from processes import KILLED_SOON, START_SECONDS, Server, serving
from streams import (
    PATIENCE,
    Stream,
    join,
    slow_request,
    start_streams,
    wait_for_end,
)

from dllm_plugin import default_model
from dllm_plugin.commands.server_end import COORDINATOR
from dllm_plugin.engine.worker.cpu_worker import DiffusionCPUWorker
from dllm_plugin.engine.worker.ranks import end_at_sigterm

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

PLAIN = (
    '--additional-config={"dllm": {"strategy": "d2f"}}',
    f"--kv-cache-memory-bytes={32 << 20}",
)
OPTIONS = (*PLAIN, "--max-model-len=512")
LONG = 440  # tokens, and as many forwards: seconds
# Of streams that do not end before what serves them is killed. Told of the checkpoint, for vLLM has
# rotary embeddings of as many positions as it says, and reads any memory behind them.
ENDLESS = 4000
UNBOUND = (
    *PLAIN,
    '--hf-overrides={"max_sequence_length": 4096}',
    "--max-model-len=4096",
)
STAGES = ("--pipeline-parallel-size=2", "--distributed-executor-backend=mp")
REPLICAS = ("--data-parallel-size=2", "--api-server-count=1")
ERROR_SECONDS = 10.0
END_SECONDS = 60.0  # vLLM's watchdog looks every five
READERS = 64


def named(server: Server, name: str) -> list[psutil.Process]:
    """The server's processes that write to its log under names that begin so."""
    pattern = rf"\({name}\w* pid=(\d+)\)"
    if name == COORDINATOR:
        pattern = r"DP Coordinator process \(PID: (\d+)\)"
    written = re.findall(pattern, server.log.read_text())
    return [psutil.Process(int(pid)) for pid in sorted(set(written))]


def processes_of(server: Server) -> list[psutil.Process]:
    """The server's processes. Forks of the template are no children of it, their stand-ins are."""
    forks = named(server, "")
    assert len(forks) >= 2, "a front end and an engine"
    stand_ins = psutil.Process(server.process.pid).children(recursive=True)
    return list({process.pid: process for process in forks + stand_ins}.values())


def plain_texts(server: Server, count: int) -> list[str]:
    """What streams say that nobody disturbs."""
    streams = start_streams(server.url, count, LONG)
    join(streams, PATIENCE)
    assert [(stream.error, stream.reason) for stream in streams] == [
        ("", "length")
    ] * count
    return [stream.text for stream in streams]


def end_of(server: Server) -> int:
    return server.process.wait(timeout=END_SECONDS)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], alive


def assert_begins(streams: Sequence[Stream], texts: Sequence[str]) -> None:
    """Each stream has sent the begin of its text. The end of a budget is seen ahead."""
    for stream, text in zip(streams, texts, strict=True):
        common = min(len(stream.text), len(text) // 2)
        assert common and stream.text[:common] == text[:common]


def killed(
    server: Server,
    victim: psutil.Process,
    processes: list[psutil.Process],
    texts: Sequence[str],
) -> None:
    """Kill a process while eight streams run; every client has an error soon, nothing is left.

    A balancer's question is not answered by then, which kept the server.
    """
    streams = start_streams(server.url, 8, ENDLESS)
    victim.suspend()
    address = httpx.URL(server.url)
    balancer = socket.create_connection((address.host, address.port), PATIENCE)
    balancer.sendall(b"GET /ready HTTP/1.1\r\nHost: test\r\n\r\n")
    time.sleep(0.2)
    victim.kill()
    began = time.monotonic()
    join(streams, ERROR_SECONDS)
    assert all(stream.error for stream in streams), [s.reason for s in streams]
    assert max(stream.ended for stream in streams) - began < ERROR_SECONDS
    assert_begins(streams, texts)
    assert end_of(server) not in (0, None)
    balancer.close()
    assert_gone(processes)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health", timeout=5)


@pytest.fixture(scope="module")
def drained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that drains when it is asked to end."""
    log = tmp_path_factory.mktemp("faults") / "log"
    options = (*OPTIONS, f"--shutdown-timeout={PATIENCE:.0f}")
    with serving(log, *options, **KILLED_SOON) as server:
        yield server


@pytest.fixture(scope="module")
def texts(drained: Server) -> list[str]:
    """What eight streams say that nobody disturbs; every server here says the same."""
    return plain_texts(drained, 8)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server by Python itself, whose processes have no stand-ins; the others are forks.

    The second of its tests kills it.
    """
    levels = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_LOG_STATS_INTERVAL": "1"}
    log, variables = tmp_path_factory.mktemp("fresh") / "log", levels | KILLED_SOON
    with serving(log, *UNBOUND, python=sys.executable, **variables) as server:
        yield server
    assert "SpecDecoding metrics" not in log.read_text()


def wait_for(server: Server, words: str) -> None:
    while words not in server.log.read_text():
        assert server.process.poll() is None, server.log.read_text()[-3000:]
        time.sleep(0.05)


def test_the_log_of_a_server_is_short(fresh: Server) -> None:
    """Nothing that our own command causes, and numbers that mean something."""
    wait_for(fresh, "diffuplug: ready")
    start, _, rest = fresh.log.read_text().partition("diffuplug: ready")
    assert len(start.splitlines()) < 20, start
    assert "--middleware" not in start
    assert f"(viewer: {fresh.url}/viewer)" in rest
    join(start_streams(fresh.url, 2, 200), PATIENCE)
    wait_for(fresh, "tokens per forward")


def test_the_engine_is_killed(fresh: Server, texts: list[str], tmp_path: Path) -> None:
    """And another server takes the port at once. Its engine ends once its front end is killed."""
    processes = psutil.Process(fresh.process.pid).children(recursive=True)
    (engine,) = [p for p in processes if p.name() == "VLLM::EngineCore"]
    killed(fresh, engine, processes, texts)
    assert "diffuplug: the engine has died" in fresh.log.read_text()
    port = int(fresh.url.rpartition(":")[2])
    with serving(tmp_path / "log", *UNBOUND, port=port, **KILLED_SOON) as again:
        assert again.url == fresh.url
        assert plain_texts(again, 2) == texts[:2]
        left = processes_of(again)
        again.process.send_signal(signal.SIGKILL)
        assert_gone(left)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--tensor-parallel-size=2",), "Worker_TP1"),
        (STAGES, "Worker_PP0"),
        (REPLICAS, "EngineCore_DP1"),
        (REPLICAS, COORDINATOR),
    ],
)
def test_one_of_two_is_killed(
    options: tuple[str, ...], name: str, texts: list[str], tmp_path: Path
) -> None:
    """A rank, the first stage of a pipeline, a replica, and what replicas are told by."""
    with serving(tmp_path / "log", *UNBOUND, *options, **KILLED_SOON) as server:
        *_, victim = named(server, name)
        killed(server, victim, processes_of(server), texts)
        died = "coordinator of the engines" if name == COORDINATOR else "engine"
        assert f"diffuplug: the {died} has died" in server.log.read_text()


def connect(server: Server, body: dict[str, Any]) -> socket.socket:
    """Send a request and read its first bytes, no more."""
    request = httpx.Request(
        "POST", f"{server.url}/v1/completions", json={"model": "tiny"} | body
    )
    head = f"POST {request.url.path} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.sendall(head.encode() + b"\r\n" + request.read())
    return connection


def test_readers_that_stop_or_vanish(drained: Server, texts: list[str]) -> None:
    """Half of them go after their first bytes, the others stay and read no more."""
    readers = [
        connect(drained, slow_request(i, 32) | {"stream": True}) for i in range(READERS)
    ]
    for reader in readers[::2]:
        assert reader.recv(16)
        reader.close()
    try:
        began = time.monotonic()
        [text] = plain_texts(drained, 1)
        assert text == texts[0] and time.monotonic() - began < PATIENCE
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
        ):
            while sum(drained.metrics(f"vllm:{name}").values()):
                assert time.monotonic() - began < 2 * PATIENCE, f"{name} is not 0"
                time.sleep(0.2)
    finally:
        for reader in readers:
            reader.close()


def test_drained(drained: Server, texts: list[str]) -> None:
    """What runs ends as if nobody had asked, what comes is refused, and the status is 0."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    processes = processes_of(drained)
    # Made before: streams may end while a client reads its certificates.
    with httpx.Client(base_url=drained.url, timeout=60) as client:
        streams = start_streams(drained.url, 4, LONG)
        drained.process.send_signal(signal.SIGTERM)
        wait_for_end(client)
        assert client.post("/v1/completions", json=body).status_code == 503
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 503
    drained.process.send_signal(signal.SIGTERM)  # once more, which changes nothing
    join(streams, PATIENCE)
    assert [stream.text for stream in streams] == texts[:4]
    assert [(stream.error, stream.reason) for stream in streams] == [
        ("", "length")
    ] * len(streams)
    assert end_of(drained) == 0
    assert_gone(processes)


class TruncatingWorker(DiffusionCPUWorker):
    """Cuts the adapter short behind the check at start, before it is merged."""

    def load_model(self, **options: Any) -> None:
        folder = Path(self.vllm_config.additional_config["dllm"]["lora_path"])
        os.truncate(folder / "adapter_model.safetensors", 1000)
        super().load_model(**options)


def test_an_adapter_is_truncated_after_its_check(
    tmp_path: Path, room: EngineRoom
) -> None:
    folder = shutil.copytree(default_model.adapter_path(), tmp_path / "adapter")
    options = {
        "model": default_model.path(),
        "worker_cls": "test_faults.TruncatingWorker",
    }
    with pytest.raises(
        ValueError, match=r"'.*/adapter_model.safetensors': it is truncated"
    ):
        room.start("bundled", {"lora_path": str(folder)}, **options)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_the_compile_cache_is_full(tmp_path: Path, full_disk: Path) -> None:
    """What compiles cannot start without a place for it: the server ends soon and says why."""
    compiled = (*OPTIONS, "--no-enforce-eager", '--compilation-config={"mode": 3}')
    where = {
        "VLLM_CACHE_ROOT": str(full_disk),
        "TORCHINDUCTOR_CACHE_DIR": str(full_disk / "i"),
    }
    log, began = tmp_path / "log", time.monotonic()
    with (
        pytest.raises(AssertionError, match="did not start"),
        serving(log, *compiled, **where),
    ):
        pass
    assert "No space left on device" in log.read_text()
    assert time.monotonic() - began < START_SECONDS / 2


class Dropping:
    """Gets SIGTERM in its destructor, where Python drops what the handler raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)


def raise_once(number: int, frame: Any) -> None:
    """Handle SIGTERM as a rank of vLLM's."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


def rank_that_drops(ready: Connection) -> None:
    """Wait for ever, after SIGTERM too."""
    signal.signal(signal.SIGTERM, raise_once)
    end_at_sigterm(0.5)
    Dropping()
    ready.send("SIGTERM was dropped")
    while True:
        time.sleep(1)


def rank_that_waits(ready: Connection) -> None:
    """Wait for ever in C, where no handler of Python's runs."""
    signal.signal(signal.SIGTERM, raise_once)
    end_at_sigterm(0.5)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    ready.send("SIGTERM comes while it waits")
    lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)


@pytest.mark.parametrize("rank", [rank_that_drops, rank_that_waits])
def test_sigterm_ends_a_rank(rank: Callable[[Connection], None]) -> None:
    """An engine whose start has failed waits for its ranks without a limit."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=rank, args=(writer,), daemon=True)
    process.start()
    try:
        assert reader.poll(START_SECONDS) and "SIGTERM" in reader.recv()
        process.join(END_SECONDS)
        assert process.exitcode == 128 + signal.SIGTERM
    finally:
        process.kill()


def test_an_engine_keeps_its_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    end_at_sigterm()
    assert signal.getsignal(signal.SIGTERM) is before


def test_not_drained(texts: list[str], tmp_path: Path) -> None:
    """With no time to drain every stream ends soon, with what it has and an error."""
    options = (*UNBOUND, "--shutdown-timeout=0")
    with serving(tmp_path / "log", *options, **KILLED_SOON) as server:
        processes = processes_of(server)
        streams = start_streams(server.url, 4, ENDLESS)
        server.process.send_signal(signal.SIGTERM)
        join(streams, ERROR_SECONDS)
        ends = [(stream.error, stream.reason) for stream in streams]
        assert all(error or reason == "abort" for error, reason in ends), ends
        assert_begins(streams, texts[:4])
        assert end_of(server) == 0
        assert_gone(processes)
