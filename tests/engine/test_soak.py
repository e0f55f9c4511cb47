"""1,200 requests, many of them wrong, hostile or abandoned, against one bundled server.

``DIFFUPLUG_SOAK_REQUESTS=5000`` sends more of them than `make test-all` has time for.
"""

import collections
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import pytest
from hostile import CHAT, COMPLETIONS, QUESTIONS, Request, each
from processes import INSIDE, SETTINGS, Server, serving

from dllm_plugin import default_model

pytestmark = pytest.mark.slow

COUNT = int(os.environ.get("DIFFUPLUG_SOAK_REQUESTS", "1200"))
AT_ONCE = 16
PROBE_EVERY = 60
SECONDS = 900  # for all of them; about a tenth of it where nothing else runs
ANSWER_SECONDS = 120
# A front end's heap steps once by 23 MB in some runs; what creeps grew 90 MB in 1,250 requests.
MOST_GROWTH = 32 << 20
ADAPTED = {"lora_path": default_model.adapter_path(), "canvas_length": 32}
VARIABLES = INSIDE | {
    "VLLM_MAX_N_SEQUENCES": "8",  # vLLM lets a request ask for 16,384 answers
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",  # see benchmarks/reports/worker_memory.md
}


@dataclass
class Outcome:
    """What a client got."""

    request: Request
    status: int = 0
    text: str = ""
    error: str = ""


def send(client: httpx.Client, request: Request) -> Outcome:
    """Ask, and stay as long as the request says."""
    outcome = Outcome(request)
    headers = {"Content-Type": request.media_type} if request.media_type else {}
    ask = client.stream("POST", request.path, content=request.content, headers=headers)
    try:
        with ask as response:
            outcome.status = response.status_code
            if request.chunks is None or response.status_code != 200:
                outcome.text = response.read().decode("utf-8", "replace")
            else:
                chunks = response.iter_raw()
                for _ in range(request.chunks):
                    outcome.text += next(chunks, b"").decode("utf-8", "replace")
    except httpx.HTTPError as error:
        outcome.error = repr(error)
    return outcome


@dataclass
class Soak:
    """Everything that was seen."""

    outcomes: list[Outcome]
    probes: list[str]
    memory: dict[str, list[int]]


def probe(server: Server) -> str:
    """The answer to a question that the bundled model knows."""
    question = [{"role": "user", "content": QUESTIONS[0]}]
    body = {"messages": question, "max_tokens": 96, "temperature": 0}
    answer = server.post("chat/completions", body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def resident(server: Server) -> dict[str, int]:
    """Bytes of each process of the server, by name."""
    front = psutil.Process(server.process.pid)
    processes = {"front end": front} | {
        p.name(): p for p in front.children(recursive=True)
    }
    return {name: p.memory_info().rss for name, p in processes.items()}


def soak(server: Server, count: int) -> Soak:
    """Send them, at most so many at once, and look at the server all the while."""
    document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    slots, began = threading.Semaphore(AT_ONCE), time.monotonic()
    futures: list[Future[Outcome]] = []
    seen = Soak([], [probe(server)], collections.defaultdict(list))
    # A connection that is used again may be one that the server is just closing as idle.
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
    with (
        httpx.Client(
            base_url=server.url, timeout=ANSWER_SECONDS, limits=limits
        ) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def give(request: Request) -> None:
            assert time.monotonic() - began < SECONDS, (
                f"only {len(futures)} requests in time"
            )
            slots.acquire()
            future = pool.submit(send, client, request)
            future.add_done_callback(lambda _: slots.release())
            futures.append(future)
            if len(futures) % PROBE_EVERY == 0:
                seen.probes.append(probe(server))
                for name, size in resident(server).items():
                    seen.memory[name].append(size)

        each(document, count, give)
    seen.outcomes = [future.result() for future in futures]
    return seen


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("soak") / "log"
    options = f"--additional-config={json.dumps({'dllm': ADAPTED})}"
    model = Path(default_model.path())
    # A process of its own, whose memory and children are the server's alone.
    with serving(
        log, options, model=model, python=sys.executable, **VARIABLES
    ) as server:
        yield server


@pytest.fixture(scope="module")
def seen(server: Server) -> Soak:
    return soak(server, COUNT)


def body_of(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(request.content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


# Errors of vLLM's own, met before or behind anything of ours: what the request must hold.
KNOWN: dict[str, Callable[[Outcome], bool]] = {
    "/v1/systemone, which says that it is not implemented": lambda o: (
        o.status == 501 and o.request.path == "/v1/systemone"
    ),
}


def is_error(outcome: Outcome) -> bool:
    """Also one that comes behind a status of 200, in a stream."""
    return outcome.status >= 500 or '"code":500' in outcome.text.replace(" ", "")


def test_no_server_error_is_ours(seen: Soak) -> None:
    errors = [outcome for outcome in seen.outcomes if is_error(outcome)]
    ours = [o for o in errors if not any(known(o) for known in KNOWN.values())]
    assert not ours, "\n".join(
        f"{o.status} {o.text[:300]} <- {o.request}" for o in ours[:10]
    )


def test_every_request_is_answered(seen: Soak) -> None:
    """Each has a status, and a stream that was not left has its end."""
    assert len(seen.outcomes) == COUNT
    lost = [o for o in seen.outcomes if o.error or not o.status or unended(o)]
    lost = [o for o in lost if not breaks_its_stream(o.request)]
    assert not lost, "\n".join(
        f"{o.error} {o.text[-200:]} <- {o.request}" for o in lost[:10]
    )


def breaks_its_stream(request: Request) -> bool:
    """Whatever the model is: vLLM 0.32 takes `null` and cannot put it into the first event."""
    body = body_of(request)
    background = body.get("background", False)
    return (
        request.path == "/v1/responses"
        and bool(body.get("stream"))
        and background is None
    )


def unended(outcome: Outcome) -> bool:
    request = outcome.request
    streams = request.path in (COMPLETIONS, CHAT) and outcome.text.startswith("data: ")
    return (
        streams
        and request.chunks is None
        and not outcome.text.endswith("data: [DONE]\n\n")
    )


def test_the_mix_is_one(seen: Soak) -> None:
    """Requests of each kind came in numbers, so that the other tests mean something."""
    counts = collections.Counter(outcome.status for outcome in seen.outcomes)
    assert counts[200] > COUNT / 4 and counts[400] > COUNT / 4, counts
    left = [
        o for o in seen.outcomes if o.status == 200 and o.request.chunks is not None
    ]
    assert len(left) > COUNT / 20
    assert {o.request.chunks for o in left} == {0, 1}


def test_a_probes_answer_stays_the_same(seen: Soak) -> None:
    assert len(seen.probes) == 1 + COUNT // PROBE_EVERY
    assert set(seen.probes) == {seen.probes[0]} and seen.probes[0].endswith("#### 29")


def test_memory_is_flat(seen: Soak) -> None:
    """From the second quarter to the last, for each process of the server."""
    assert {"front end", "VLLM::EngineCore"} <= set(seen.memory)
    quarter = COUNT // PROBE_EVERY // 4
    for name, sizes in seen.memory.items():
        second, last = sizes[quarter : 2 * quarter], sizes[3 * quarter :]
        assert median(last) - median(second) < MOST_GROWTH, (
            f"{name}: {[s >> 20 for s in sizes]}"
        )


@pytest.mark.usefixtures("seen")
def test_nothing_is_left(server: Server) -> None:
    """No request and no page; and as many requests as there are slots get one answer."""
    deadline = time.monotonic() + 60
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        while sum(server.metrics(f"vllm:{name}").values()):
            assert time.monotonic() < deadline, f"{name} is not 0"
            time.sleep(0.2)
    slots = int(str(SETTINGS["max_num_seqs"]))
    long = {"max_tokens": 96, "ignore_eos": True, "vllm_xargs": {"dllm_threshold": 1.0}}
    with ThreadPoolExecutor(slots) as pool:
        answers = [
            pool.submit(server.complete, QUESTIONS[0], **long) for _ in range(slots)
        ]
    assert len({answer.result()["choices"][0]["text"] for answer in answers}) == 1
