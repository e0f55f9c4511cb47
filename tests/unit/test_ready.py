"""The line of `diffuplug serve` that says where it listens: once, and not before it does."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dllm_plugin.commands import server

LATER = 4 * server.POLL_SECONDS
ROUTES = [SimpleNamespace(path="/health"), SimpleNamespace(path=server.VIEWER)]


def state_of(**arguments: Any) -> Any:
    """What vLLM keeps of a server with an ordinary model."""
    given = {"host": None, "port": 8000, "uds": None, "ssl_certfile": None}
    model = SimpleNamespace(served_model_name="tiny", architecture="LlamaForCausalLM")
    return SimpleNamespace(
        args=SimpleNamespace(**given | arguments),
        server=SimpleNamespace(
            started=False, should_exit=False, config=SimpleNamespace()
        ),
        engine_client=SimpleNamespace(errored=False),
        vllm_config=SimpleNamespace(
            model_config=model, parallel_config=SimpleNamespace(_api_process_rank=-1)
        ),
    )


def lines_of(state: Any, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Start an application, and let its server listen later; return lines before and after."""

    async def run() -> list[list[str]]:
        ends = asyncio.Event()

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "lifespan.startup.complete"})
            await ends.wait()

        async def nothing(*_: Any) -> Any:
            return None

        app = SimpleNamespace(state=state, routes=ROUTES)
        scope = {"type": "lifespan", "app": app}
        running = asyncio.create_task(server.Lifecycle(inner)(scope, nothing, nothing))
        printed = []
        for started in (False, True):
            state.server.started = started
            await asyncio.sleep(LATER)
            printed.append(capsys.readouterr().err.splitlines())
        ends.set()
        await running
        return printed

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ({}, "http://localhost:8000 (viewer: http://localhost:8000/viewer)"),
        ({"host": "::1"}, "http://[::1]:8000 (viewer: http://[::1]:8000/viewer)"),
        ({"uds": "/socket"}, "/socket"),
    ],
)
def test_the_line_comes_when_the_server_listens(
    arguments: dict[str, Any], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = lines_of(state_of(**arguments), capsys)
    assert before == []
    assert after == [
        f"diffuplug: ready at {address}, model tiny, decoding as vLLM does"
    ]


@pytest.mark.parametrize(("rank", "count"), [(-1, 1), (0, 1), (1, 0), (3, 0)])
def test_one_of_several_front_ends_prints_the_line(
    rank: int, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    state = state_of()
    state.vllm_config.parallel_config._api_process_rank = rank
    before, after = lines_of(state, capsys)
    assert (len(before), len(after)) == (0, count)
