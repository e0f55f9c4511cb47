"""``diffuplug serve`` on a GPU, on each vLLM: chat, streams, grammars, and readers that go."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

START_SECONDS = 300
QUESTION = "Ann has 12 apples and buys 30 more. How many apples does she have?"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}


class Client:
    """Asks a server; the standard library alone, for a host of GPUs may have no other client."""

    def __init__(self, port: int) -> None:
        self.port = port

    def send(
        self, method: str, path: str, body: dict | None = None
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        connection.request(
            method, path, None if body is None else json.dumps(body), headers
        )
        return connection.getresponse()

    def chat(self, **options) -> http.client.HTTPResponse:
        body = {"model": "diffuplug", "temperature": 0, "max_tokens": 96}
        body |= {"messages": [{"role": "user", "content": QUESTION}]}
        response = self.send("POST", "/v1/chat/completions", body | options)
        assert response.status == 200, response.read()
        return response

    def text(self, **options) -> str:
        return json.loads(self.chat(**options).read())["choices"][0]["message"][
            "content"
        ]

    def running(self) -> float:
        page = self.send("GET", "/metrics").read().decode()
        found = re.findall(
            r"^vllm:num_requests_running\{.*\} (\S+)$", page, re.MULTILINE
        )
        return sum(map(float, found))


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[Client]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "dllm_plugin.commands.cli",
        "serve",
        "--host",
        "127.0.0.1",
    ]
    command += ["--port", str(port), "--attention-backend", "TRITON_ATTN"]
    file = tmp_path_factory.mktemp("server") / "log"
    client, deadline = Client(port), time.monotonic() + START_SECONDS
    with file.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=dict(os.environ)
        )
    try:
        while True:
            assert process.poll() is None, file.read_text()[-6000:]
            assert time.monotonic() < deadline, file.read_text()[-6000:]
            try:
                if client.send("GET", "/health").status == 200:
                    break
            except OSError:
                time.sleep(0.5)
        yield client
    finally:
        process.terminate()
        process.wait(60)
        print(file.read_text()[-4000:])


def test_an_answer_is_right_and_its_stream_is_equal(client):
    assert "42" in client.text()
    blocks = {"vllm_xargs": {"dllm_block_length": 8}}
    whole, pieces = client.text(**blocks), []
    for line in client.chat(stream=True, **blocks):
        if line.startswith(b"data: {"):
            pieces.append(
                json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            )
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1


def test_an_answer_fits_its_schema(client):
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA},
    }
    assert type(json.loads(client.text(response_format=schema))["answer"]) is int


def test_many_together_answer_as_one_alone(client):
    alone = client.text()
    with ThreadPoolExecutor(32) as pool:
        hot = [
            pool.submit(client.text, temperature=0.8, top_p=0.9, seed=i)
            for i in range(16)
        ]
        cold = [pool.submit(client.text) for _ in range(16)]
        texts = [one.result() for one in cold]
        assert all(one.result() for one in hot)
    assert texts.count(alone) >= 15  # near ties may fall otherwise in bfloat16


def test_a_reader_that_goes_ends_its_request(client):
    endless = {"stream": True, "max_tokens": 800, "ignore_eos": True}
    gone = [client.chat(**endless, seed=i) for i in range(8)]
    for response in gone:
        response.readline()
        response.close()
    deadline = time.monotonic() + 20
    while client.running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert client.running() == 0
    assert "42" in client.text()
