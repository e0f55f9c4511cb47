"""The line of `diffuplug serve` that says where it listens: once, and not before it does."""

import asyncio
import socket
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dllm_plugin.commands import ready

LATER = 4 * ready.POLL_SECONDS


def start(
    monkeypatch: pytest.MonkeyPatch, bound: socket.socket, rank: int = 0
) -> list[int]:
    """Start an application, and let its socket listen later; return lines before and after."""
    lines: list[Any] = []
    monkeypatch.setattr(
        ready, "ready_line", lambda state: lines.append(state) or "ready"
    )
    name = bound.getsockname()
    args = Namespace(host="127.0.0.1", port=None, uds=None)
    if isinstance(name, str):
        args.uds = name
    else:
        args.port = name[1]
    config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_rank=rank))
    state = SimpleNamespace(args=args, vllm_config=config)

    async def run() -> list[int]:
        ends = asyncio.Event()

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "lifespan.startup.complete"})
            await ends.wait()

        async def nothing(*_: Any) -> Any:
            return None

        scope = {"type": "lifespan", "app": SimpleNamespace(state=state)}
        running = asyncio.create_task(ready.ReadyLine(inner)(scope, nothing, nothing))
        await asyncio.sleep(LATER)
        counts = [len(lines)]
        bound.listen()
        await asyncio.sleep(LATER)
        counts.append(len(lines))
        ends.set()
        await running
        return counts

    with bound:
        return asyncio.run(run())


def test_on_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    assert start(monkeypatch, bound) == [0, 1]


@pytest.mark.parametrize(("rank", "lines"), [(-1, 1), (0, 1), (1, 0), (3, 0)])
def test_on_a_socket_in_a_folder_by_one_of_several_front_ends(
    rank: int, lines: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(tmp_path / "server"))
    assert start(monkeypatch, bound, rank) == [0, lines]
