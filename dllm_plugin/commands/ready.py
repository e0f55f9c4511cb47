"""Say that a server is ready: the last line of a start of ``diffuplug serve``.

vLLM takes ASGI middleware by name (``--middleware``), and middleware sees the application's start.
So the line comes from the server's own process, without a change to vLLM.
"""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.decoding.families import FAMILIES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

POLL_SECONDS, POLLS = 0.05, 1200  # for a minute
ANY_ADDRESS = {"": "localhost", "0.0.0.0": "localhost", "::": "localhost"}


class ReadyLine:
    """Pass everything on; once the server accepts connections, print where it listens."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._announcement: asyncio.Task[None] | None = None  # a task lives as long as its name

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request, or the start and end of the application."""
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return

        async def watching(message: Message) -> None:
            await send(message)
            state = scope["app"].state
            if message["type"] == "lifespan.startup.complete" and _speaks(state):
                self._announcement = asyncio.create_task(_announce(state))

        await self.app(scope, receive, watching)
        if self._announcement is not None:
            self._announcement.cancel()


def _speaks(state: Any) -> bool:
    """Return whether this is the first, or the only one, of the processes that serve."""
    return state.vllm_config.parallel_config._api_process_rank <= 0


async def _announce(state: Any) -> None:
    """Print the line when the server accepts a connection, which it does after this start."""
    for _ in range(POLLS):
        try:
            _, writer = await _connect(state.args)
        except OSError:  # not listening yet
            await asyncio.sleep(POLL_SECONDS)
        else:
            writer.close()
            break
    print(ready_line(state), file=sys.stderr, flush=True)


async def _connect(arguments: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if arguments.uds:
        return await asyncio.open_unix_connection(arguments.uds)
    host = ANY_ADDRESS.get(arguments.host or "", arguments.host)
    return await asyncio.open_connection(host, arguments.port)


def ready_line(state: Any) -> str:
    """Format address, model and decoding, from what vLLM keeps about its server."""
    arguments, config = state.args, state.vllm_config
    host = ANY_ADDRESS.get(arguments.host or "", arguments.host)
    scheme = "https" if arguments.ssl_certfile else "http"
    address = arguments.uds or f"{scheme}://{_in_url(host)}:{arguments.port}"
    names = config.model_config.served_model_name
    model = names if isinstance(names, str) else names[0]
    return f"diffuplug: ready at {address}, model {model}, {_decoding(config)}"


def _in_url(host: str) -> str:
    try:
        socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return host
    return f"[{host}]"


def _decoding(vllm_config: Any) -> str:
    if vllm_config.model_config.architecture not in FAMILIES:
        return "decoding as vLLM does"
    config = get_decode_config(vllm_config)
    return f"decoding {config.strategy} with policy {config.policy}"
