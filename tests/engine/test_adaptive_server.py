"""Floating canvases over HTTP: records, replays, counts, metrics and what is said at start."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import letters
from processes import INSIDE, serving

pytestmark = pytest.mark.slow

DLLM = {"strategy": "d2f", "adaptive": "throughput", "threshold": 0.4, "min_window": 2}
BODY = {"model": "tiny", "prompt": letters(20, 2), "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's log."""
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def client(log: Path) -> Iterator[httpx.Client]:
    """A server whose widths are chosen by load."""
    config = json.dumps({"dllm": DLLM})
    with (
        serving(log, f"--additional-config={config}", **INSIDE) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


def post(client: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/completions", json=BODY | {"temperature": 0} | body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_reply_holds_its_record_and_replays(client: httpx.Client) -> None:
    wish = {"temperature": 0.7, "seed": 3}
    first = post(client, vllm_xargs={"dllm_statistics": 1}, **wish)
    counts = first["metrics"]["speculative_decoding"]
    widths, pieces = counts["per_step_drafted"], counts["per_step_accepted"]
    assert sum(pieces) == 40 and len(widths) == len(pieces) and min(widths) >= 2
    arguments = {"dllm_statistics": 1, "dllm_schedule": widths}
    again = post(client, vllm_xargs=arguments, **wish)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["metrics"]["speculative_decoding"]["per_step_drafted"] == widths


def test_counts_and_refusals(client: httpx.Client) -> None:
    """A reply without the field says nothing of widths; a wrong schedule is refused."""
    plain = post(client, vllm_xargs={"dllm_schedule": [8, 2]})
    assert "per_step" not in json.dumps(plain)
    asked = post(client, vllm_xargs={"dllm_schedule": [8, 2]}, diffusion={})
    counts = asked["choices"][0]["diffusion"]
    assert asked["choices"][0]["text"] == plain["choices"][0]["text"]
    assert counts["computed_positions"] == 20 + 8 + 2 * (counts["forwards"] - 1)
    refused = client.post(
        "/v1/completions", json=BODY | {"vllm_xargs": {"dllm_schedule": [0]}}
    )
    assert refused.status_code == 400
    assert "dllm_schedule must hold whole numbers" in refused.json()["error"]["message"]


def test_metrics_and_log(client: httpx.Client, log: Path) -> None:
    post(client)
    found = client.get("/metrics").text
    for name in (
        "width_bucket",
        "width_changes_total",
        "acceptance_p0",
        "acceptance_lambda",
    ):
        assert f"diffuplug:{name}{{" in found, name
    # What steps computed of canvases is vLLM's own.
    assert "vllm:diffusion_num_canvas_positions_total{" in found
    said = log.read_text()
    assert said.count("chosen by load, so a text depends on load and timing too") == 1
    assert said.count("Nobody has published how accurate") == 1
