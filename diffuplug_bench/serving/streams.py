"""Read many streams of a server at once, and record when text and frames arrive."""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

from diffuplug_bench.serving.server import MODEL

DATA, DONE = b"data: ", b"[DONE]"
# In a chunk with a frame, and in a chunk without text.
FRAME, NO_TEXT = b'"set":', b'"text":""'
TOKEN = re.compile(rb"w\d")  # a word of `server.write_tokenizer`


@dataclass
class Stream:
    """Record one stream; seconds are of one clock.

    texts     when text arrived, and how many tokens it had: a busy server sends blocks together
    received  bytes of the whole stream
    """

    sent: float
    texts: list[tuple[float, int]] = field(default_factory=list)
    frames: int = 0
    received: int = 0
    tokens: int = 0
    ended: float = 0.0


def bodies_of(asks: list[Any], watched: int) -> list[dict[str, Any]]:
    """Return the bodies of completion requests; the first `watched` ask for frames."""
    bodies = []
    for i, ask in enumerate(asks):
        sampling = dict(ask.sampling)
        body = {"model": MODEL, "prompt": ask.prompt, "temperature": 0, "stream": True}
        body |= {"vllm_xargs": sampling.pop("extra_args"), **sampling}
        body["stream_options"] = {"include_usage": True}
        bodies.append(body | ({"diffusion": {"frames": True}} if i < watched else {}))
    return bodies


def read_all(url: str, bodies: list[dict[str, Any]]) -> list[Stream]:
    """Send all requests at once and read their streams to the end."""
    return asyncio.run(_read_all(url, bodies))


async def _read_all(url: str, bodies: list[dict[str, Any]]) -> list[Stream]:
    import aiohttp

    limits = aiohttp.ClientTimeout(total=None, sock_read=600)
    connector = aiohttp.TCPConnector(limit=len(bodies))
    async with aiohttp.ClientSession(
        url, timeout=limits, connector=connector
    ) as session:
        streams = [_read(session, body) for body in bodies]
        return list(await asyncio.gather(*streams))


async def _read(session: Any, body: dict[str, Any]) -> Stream:
    stream = Stream(time.perf_counter())
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise ValueError(f"the server refused a request: {await response.text()}")
        async for line in response.content:
            stream.received += len(line)
            if line.startswith(DATA):
                _read_event(stream, line.removeprefix(DATA))
    stream.ended = time.perf_counter()
    return stream


def _read_event(stream: Stream, data: bytes) -> None:
    """Read an event. Only the last chunk is parsed: this process must not delay the server."""
    if FRAME in data:
        stream.frames += 1
    elif b'"choices":[]' in data:
        stream.tokens = json.loads(data)["usage"]["completion_tokens"]
    elif not data.startswith(DONE) and NO_TEXT not in data:
        if b'"error"' in data:
            raise ValueError(f"the server ended a request: {data.decode()}")
        stream.texts.append((time.perf_counter(), len(TOKEN.findall(data))))
