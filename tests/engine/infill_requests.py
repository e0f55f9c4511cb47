"""Requests with gaps to the tiny server, plain and streamed."""

import json
from typing import Any

import httpx

PREFIX, SUFFIX = "def area(r):\n    return ", " * r * r\n"
GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True}
LENGTHS = [2, 5, 12]
CHOSEN = GREEDY | {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 12}
FIM = CHOSEN | {"diffusion": {"lengths": 12}}


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(f"/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def stream(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> list[dict[str, Any]]:
    """Chunks of a stream."""
    with client.stream("POST", f"/v1/{path}", json=body | {"stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def by_template(
    client: httpx.Client, prompt: list[int], template: list[int], **more: Any
) -> Any:
    """What the engine makes of the ids."""
    end = len(template) - template[::-1].index(-1)
    body = GREEDY | {"prompt": prompt, "max_tokens": end, "return_token_ids": True}
    return post(
        client, "completions", body | {"vllm_xargs": {"dllm_template": template}} | more
    )


TEXT = "The capital of [MASK:3] is [MASK:8]."
PARTS = ["The capital of ", {"mask": 3}, " is ", {"mask": 8}, "."]


TWO = {"text": TEXT}
