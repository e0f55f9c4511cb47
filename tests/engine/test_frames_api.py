"""Frames and traces over HTTP, as they stream."""

import json
import time
from typing import Any

import httpx
import pytest
from api_requests import (
    BODY,
    CHAT,
    COMPLETION,
    SMALL,
    is_frame,
    post,
    settled,
    stream,
    text_of,
)


@pytest.mark.parametrize(
    "path,prompt", [("chat/completions", CHAT), ("completions", COMPLETION)]
)
@pytest.mark.parametrize("early", [False, True])
def test_frames_in_a_stream(
    client: httpx.Client, path: str, prompt: Any, early: bool
) -> None:
    """A client that reads text alone reads the same; frames replayed are the text of tokens."""
    hot = prompt | {"n": 3, "temperature": 1.5, "seed": 5, "return_token_ids": True}
    plain = stream(client, path, **hot)
    watched = stream(
        client, path, **hot, diffusion={"frames": True, "early_text": early}
    )
    frames = [chunk for chunk in watched if is_frame(chunk)]
    others = [chunk for chunk in watched if not is_frame(chunk)]
    assert text_of(others) == text_of(plain) == text_of(watched)
    assert {chunk["id"] for chunk in watched} == {watched[0]["id"]}
    assert all(chunk["choices"] or chunk["usage"] for chunk in watched)
    shown: list[dict[int, str]] = [{}, {}, {}]
    final = [0, 0, 0]
    for chunk in frames:
        [choice] = chunk["choices"]
        frame, index = choice["diffusion"], choice["index"]
        assert choice["finish_reason"] is None
        assert choice.get("delta", {}) == {} and not choice.get("text")
        for position in frame["unset"]:
            del shown[index][position]
        shown[index] |= {position: text for position, text, _ in frame["set"]}
        assert final[index] <= frame["final"] <= frame["start"] + frame["length"]
        final[index] = frame["final"]
    assert final == [48, 48, 48]
    for index, texts in enumerate(shown):
        assert "".join(texts[i] for i in range(48)) == text_of(plain)[index]
    told = watched[-1]["metrics"]["diffusion"]
    assert told["tokens"] == 144 and len(frames) > 5


@pytest.mark.parametrize(
    "path,prompt", [("chat/completions", CHAT), ("completions", COMPLETION)]
)
def test_traces_of_each_choice(client: httpx.Client, path: str, prompt: Any) -> None:
    """The same in a reply and in a stream, also with frames; cut where a stop string cuts."""
    hot = prompt | {"n": 2, "temperature": 1.5, "seed": 7, "diffusion": {"trace": True}}
    whole = post(client, path, **hot, return_token_ids=True)
    told = [choice["diffusion"].pop("trace") for choice in whole["choices"]]
    plain = post(client, path, **hot | {"diffusion": {}}, return_token_ids=True)
    assert whole["choices"] == plain["choices"], "nothing else is another"
    for choice, trace in zip(whole["choices"], told, strict=True):
        steps, certain = trace["steps"], trace["confidences"]
        assert len(steps) == len(certain) == len(choice["token_ids"]) == 48
        assert min(steps) == 1 and max(steps) == choice["diffusion"]["forwards"]
        assert all(0 < value <= 1 for value in certain)
    for more in ({}, {"frames": True, "early_text": True}):
        chunks = stream(client, path, **hot | {"diffusion": {"trace": True} | more})
        fields = [
            (c["index"], c.get("diffusion", {})) for k in chunks for c in k["choices"]
        ]
        assert {i: f["trace"] for i, f in fields if "trace" in f} == dict(
            enumerate(told)
        )
    text = whole["choices"][0].get("text") or whole["choices"][0]["message"]["content"]
    cut = post(client, path, **hot | {"stop": [text[20:23]]}, return_token_ids=True)[
        "choices"
    ][0]
    kept, steps = len(cut["token_ids"]), cut["diffusion"]["trace"]["steps"]
    assert 0 < kept < 48 and steps == told[0]["steps"][:kept]


@pytest.mark.parametrize("ended", [False, True])
def test_a_reader_that_sleeps_loses_frames_and_no_text(
    client: httpx.Client, ended: bool
) -> None:
    """For a second, or until the engine is done. Others are answered meanwhile."""
    slow = (
        BODY
        | COMPLETION
        | {"max_tokens": 200, "stream": True, "diffusion": {"frames": True}}
    )
    slow["vllm_xargs"] = SMALL | {"dllm_threshold": 1.0}
    whole = post(client, "completions", **slow | {"stream": False, "diffusion": {}})
    chunks = []
    with client.stream("POST", "/v1/completions", json=slow) as reply:
        lines = (line for line in reply.iter_lines() if line)
        chunks.append(next(lines))
        other = httpx.Client(
            base_url=client.base_url, headers=client.headers, timeout=60
        )
        with other:
            post(other, "completions", **COMPLETION)
            if ended:
                settled(other)
            else:
                time.sleep(1)
        chunks += lines
    read = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-1]]
    assert text_of(read)[0] == whole["choices"][0]["text"]
    told = whole["choices"][0]["diffusion"]
    assert sum(map(is_frame, read)) <= told["forwards"]
