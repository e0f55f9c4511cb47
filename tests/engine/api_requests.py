"""Requests to the endpoints of the tiny server, plain and streamed."""

import json
import re
import time
from typing import Any

import httpx
from engines import LETTERS, letters

PROMPT = letters(20, 2)
MESSAGES = [{"role": "user", "content": "What is 2+2?"}]
READABLE = {
    "allowed_token_ids": LETTERS,
    "ignore_eos": True,
    "max_tokens": 48,
    "temperature": 0,
}
SMALL = {"dllm_block_length": 8, "dllm_threshold": 0.4}
BODY = READABLE | {"model": "tiny", "vllm_xargs": SMALL}
CHAT, COMPLETION = {"messages": MESSAGES}, {"prompt": PROMPT}


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = client.post(f"/v1/{path}", json=BODY | body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def stream(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """Chunks of a stream with usage."""
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}} | body
    with client.stream("POST", f"/v1/{path}", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def metrics(client: httpx.Client) -> dict[str, float]:
    """Every sample of /metrics, summed over its labels."""
    samples: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if line[:1] != "#":
            name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
            samples[name] = samples.get(name, 0.0) + value
    return samples


def ended(client: httpx.Client) -> dict[str, float]:
    """How many requests ended, by reason."""
    counts = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("diffuplug:request_forwards_count"):
            reason = re.search('reason="([a-z]+)"', line)
            assert reason is not None, line
            counts[reason[1]] = float(line.rsplit(" ", 1)[1])
    return counts


def settled(client: httpx.Client) -> dict[str, float]:
    """The same when no request runs any more."""
    deadline = time.monotonic() + 60
    last = None
    while (now := ended(client)) != last or metrics(client)[
        "vllm:num_requests_running"
    ]:
        assert time.monotonic() < deadline, "requests still run"
        last = now
        time.sleep(0.5)
    return now


def is_frame(chunk: dict[str, Any]) -> bool:
    return any("set" in choice.get("diffusion", {}) for choice in chunk["choices"])


def text_of(chunks: list[dict[str, Any]]) -> list[str]:
    """Text of each choice as old clients read it."""
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = (
                choice["text"] if "text" in choice else choice["delta"].get("content")
            )
            texts[choice["index"]] += piece or ""
    return texts
