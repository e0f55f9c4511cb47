"""Many streamed requests to one server, each in a thread: what came, and how it ended."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from engines import LETTERS, letters

# One token a forward, of letters alone, and never an end before `max_tokens`.
SLOW = {"allowed_token_ids": LETTERS, "ignore_eos": True, "temperature": 0}
ONE_BY_ONE = {"dllm_threshold": 1.0, "dllm_block_length": 8}
# What is held up never comes, so a wide limit finds it too, also on a busy machine.
PATIENCE = 300.0


def slow_request(index: int, max_tokens: int) -> dict[str, Any]:
    """A request that takes as many forwards as tokens."""
    prompt = letters(12 + index % 5, index)
    return SLOW | {"prompt": prompt, "max_tokens": max_tokens, "vllm_xargs": ONE_BY_ONE}


def assert_by_blocks(texts: Sequence[str], length: int) -> None:
    """Pieces of a stream of letters are whole blocks; a busy server joins those not sent yet."""
    pieces = [len(text) for text in texts if text]
    assert len(pieces) > 1 and not any(piece % length for piece in pieces), pieces


@dataclass
class Stream:
    """One streamed request; `started` is set with the first text."""

    body: dict[str, Any]
    text: str = ""
    reason: str | None = None
    error: str = ""
    ended: float = 0.0
    started: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(default_factory=threading.Thread)

    def start(self, url: str) -> None:
        """Ask, and read in a thread."""
        self.thread = threading.Thread(target=self._run, args=(url,), daemon=True)
        self.thread.start()

    def _run(self, url: str) -> None:
        body = {"model": "tiny", "stream": True} | self.body
        try:
            address = f"{url}/v1/completions"
            with httpx.stream("POST", address, json=body, timeout=PATIENCE) as response:
                if response.status_code != 200:
                    self.error = response.read().decode()
                for line in response.iter_lines():
                    self._read(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = repr(error)
        self.ended = time.monotonic()

    def _read(self, line: str) -> None:
        if not line.startswith("{"):
            return
        chunk = json.loads(line)
        if "error" in chunk:
            self.error = line
            return
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.reason = choice["finish_reason"] or self.reason
            if self.text:
                self.started.set()


def start_streams(url: str, count: int, max_tokens: int) -> list[Stream]:
    """Start so many, and wait until each has sent text."""
    streams = [Stream(slow_request(i, max_tokens)) for i in range(count)]
    for stream in streams:
        stream.start(url)
    for stream in streams:
        assert stream.started.wait(PATIENCE), stream.error
    return streams


def join(streams: Sequence[Stream], seconds: float) -> None:
    """Wait until all have ended."""
    deadline = time.monotonic() + seconds
    for stream in streams:
        stream.thread.join(max(0.0, deadline - time.monotonic()))
    left = [stream.body["prompt"] for stream in streams if stream.thread.is_alive()]
    assert not left, f"{len(left)} streams have no end after {seconds} s"


def wait_for_end(client: httpx.Client) -> None:
    """Wait until a server that was asked to end refuses requests."""
    began = time.monotonic()
    while client.get("/health").status_code == 200:
        assert time.monotonic() - began < 60, "it takes requests"
        time.sleep(0.01)
