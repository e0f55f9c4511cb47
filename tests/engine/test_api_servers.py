"""Our endpoints next to what vLLM can do with a server: several processes, other models."""

import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import psutil
import pytest
from engines import CHECKPOINTS, letters
from processes import INSIDE, Server, serving

pytestmark = pytest.mark.slow

BODY = {"model": "tiny", "prompt": letters(20, 2), "max_tokens": 24, "ignore_eos": True}
OFF = "The endpoints of DiffuPlug are off: VLLM_PLUGINS does not name diffuplug_api."


class Spans(BaseHTTPRequestHandler):
    """Keep what an exporter of OpenTelemetry posts."""

    posted: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.posted.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def collector() -> Iterator[str]:
    """The address of a collector of spans."""
    with HTTPServer(("127.0.0.1", 0), Spans) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()


def fill(server: Server) -> tuple[int, tuple[str, str]]:
    """The process that filled gaps, and a gap before a suffix; and what it filled in."""
    gaps = {"text": "The capital of [MASK:3] is [MASK:2,4].", "temperature": 0}
    fim = {
        "prompt": "def area(r):",
        "suffix": "r * r",
        "max_tokens": 8,
        "temperature": 0,
    }
    with httpx.Client(base_url=server.url, timeout=60) as client:
        [choice] = client.post("/v1/infill", json=gaps).json()["choices"]
        assert [one["length"] for one in choice["diffusion"]["lengths"]] == [
            [3, 2],
            [3, 4],
        ]
        reply = client.post("/v1/fim/completions", json=fim)
        [told] = reply.json()["choices"]
        assert [one["length"] for one in told["diffusion"]["lengths"]] == [4, 8]
        stream = reply.extensions["network_stream"]
        ours, theirs = (
            stream.get_extra_info("client_addr"),
            stream.get_extra_info("server_addr"),
        )
        [process] = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.raddr
            and (connection.laddr, connection.raddr) == (theirs, ours)
        ]
    return process, (choice["text"], told["text"])


def test_two_api_server_processes_and_spans(tmp_path: Path, collector: str) -> None:
    """Each counts its own requests; both answer on the one address, and trace every request."""
    options = ("--api-server-count=2", f"--otlp-traces-endpoint={collector}")
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with serving(tmp_path / "log", *options, **protocol) as server:
        plain = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).json()
        assert "diffusion" not in plain["choices"][0] and plain["metrics"] is None
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        for _ in range(7):  # a new connection each time
            reply = httpx.post(
                f"{server.url}/v1/completions",
                json=BODY | {"diffusion": {}},
                headers={"traceparent": trace},
                timeout=60,
            )
            assert reply.json()["choices"][0]["diffusion"]["tokens"] == 24
        metrics = httpx.get(f"{server.url}/metrics").text.splitlines()
        counts = [
            line
            for line in metrics
            if line.startswith("diffuplug:request_forwards_count")
        ]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in counts) == 8
        deadline = time.monotonic() + 60
        while (spans := b"".join(Spans.posted)).count(b"diffusion_decode") < 8:
            assert time.monotonic() < deadline, "not every request has a span"
            time.sleep(0.5)
        filled = [fill(server) for _ in range(8)]
        while len({process for process, _ in filled}) < 2 and len(filled) < 40:
            filled.append(fill(server))
    assert len({process for process, _ in filled}) == 2, "both have answered"
    assert len({texts for _, texts in filled}) == 1
    assert spans.count(bytes.fromhex("0af7651916cd43dd8448eb211c80319c")) >= 7
    assert spans.count(b"diffuplug.wasted_positions") == 8


def test_switched_off_by_name(tmp_path: Path) -> None:
    """A list of plugins that is set stays; without us in it, vLLM's own routes answer."""
    names = "register_dllm_models,register_omni,diffuplug"
    with serving(tmp_path / "log", VLLM_PLUGINS=names, **INSIDE) as server:
        assert OFF in (tmp_path / "log").read_text()
        reply = httpx.post(
            f"{server.url}/v1/completions", json=BODY | {"diffusion": {}}
        )
        assert (
            reply.status_code == 200 and "diffusion" not in reply.json()["choices"][0]
        )


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    """An autoregressive model gets vLLM's replies from the same server."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "llama"
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINTS / "tiny-llada" / file, folder)
    with serving(tmp_path / "log", model=folder, **INSIDE) as server:
        body = BODY | {"diffusion": {"frames": True}}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert reply["usage"]["completion_tokens"] == 24
        assert reply["metrics"] is None and "diffusion" not in reply["choices"][0]
