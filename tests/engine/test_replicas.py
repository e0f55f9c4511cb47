"""Two servers behind HAProxy with `deploy/haproxy.cfg`: one is killed, starts again, drains."""

import contextlib
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from engines import letters
from processes import (
    HERE,
    KILLED_SOON,
    Server,
    end,
    environment,
    free_port,
    serving,
    spawn,
)
from streams import PATIENCE, Stream, join, slow_request, start_streams
from test_faults import END_SECONDS, ERROR_SECONDS, UNBOUND, processes_of

HAPROXY = shutil.which("haproxy")
pytestmark = [
    pytest.mark.usefixtures("template"),
    pytest.mark.slow,
    pytest.mark.skipif(HAPROXY is None, reason="needs haproxy"),
]

CONFIG = HERE.parents[1] / "deploy" / "haproxy.cfg"
DRAINS = (*UNBOUND, f"--shutdown-timeout={PATIENCE:.0f}")
LONG = 1500  # tokens, and as many forwards: many seconds


@contextlib.contextmanager
def router(log: Path, ports: list[int]) -> Iterator[str]:
    """Return the address of a router before two servers."""
    first, second = (f"127.0.0.1:{port}" for port in ports)
    bind = f"127.0.0.1:{free_port()}"
    variables = environment(BIND=bind, FIRST=first, SECOND=second)
    with log.open("wb") as file:
        process = spawn(
            [str(HAPROXY), "-db", "-f", str(CONFIG)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
        )
    try:
        yield f"http://{bind}"
    finally:
        end(process)


class Client:
    """Asks for short texts without a pause, in a thread, and keeps what is wrong."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[int] = []
        self.texts: set[str] = set()
        self.stops = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        body = slow_request(0, 4) | {"model": "tiny"}
        while not self.stops.is_set():
            address = f"{self.url}/v1/completions"
            answer = httpx.post(address, json=body, timeout=PATIENCE)
            self.answers.append(answer.status_code)
            if answer.status_code == 200:
                self.texts.add(answer.json()["choices"][0]["text"])

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Ask meanwhile; every request has one right answer."""
        self.thread.start()
        try:
            yield
        finally:
            self.stops.set()
            self.thread.join(PATIENCE)
        assert set(self.answers) == {200} and len(self.texts) == 1, self.answers


def wait_until_both_serve(url: str, servers: list[Server]) -> None:
    """Ask until each server has answered through the router."""
    deadline = time.monotonic() + END_SECONDS
    body = {"model": "tiny", "prompt": letters(3, 0), "max_tokens": 1}
    name = "vllm:generation_tokens_total"
    while not all(sum(one.metrics(name).values()) for one in servers):
        assert time.monotonic() < deadline, "the router does not find both"
        httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def texts_of(streams: list[Stream]) -> list[str]:
    join(streams, PATIENCE)
    assert all(stream.reason == "length" for stream in streams)
    return [stream.text for stream in streams]


def test_one_of_two_servers_is_killed_and_one_drains(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:

        def start(i: int) -> Server:
            log = tmp_path / f"{i} at {time.monotonic()}"
            server = serving(log, *DRAINS, port=ports[i], **KILLED_SOON)
            return stack.enter_context(server)

        url = stack.enter_context(router(tmp_path / "router", ports))
        first, second = start(0), start(1)
        wait_until_both_serve(url, [first, second])
        expected = texts_of(start_streams(url, 8, LONG))

        processes = processes_of(first)
        streams = start_streams(url, 8, LONG)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        began = time.monotonic()
        join(streams, PATIENCE)
        lost = [stream for stream in streams if stream.reason != "length"]
        assert 0 < len(lost) < 8 and all(stream.error for stream in lost)
        assert all(stream.ended - began < ERROR_SECONDS for stream in lost)
        for stream, text in zip(streams, expected, strict=True):
            kept = len(stream.text) if stream.error else len(text)
            assert stream.text == text[:kept]

        # While the first server loads, all requests go to the second.
        with Client(url).asking():
            first = start(0)
            wait_until_both_serve(url, [first, second])

        streams = start_streams(url, 8, LONG)
        assert sum(second.metrics("vllm:num_requests_running").values()) > 0
        with Client(url).asking():
            second.process.send_signal(signal.SIGTERM)
            assert second.process.wait(PATIENCE) == 0
        assert texts_of(streams) == expected
