"""Say that a server is ready: the last line of a start of ``diffuplug serve``.

vLLM takes ASGI middleware by name (``--middleware``), and middleware sees the application's start.
So the line comes from the server's own process, without a change to vLLM.

End ``diffuplug serve`` so that clients and supervisors see what happened.

vLLM's server does so but for two things. When its engine has died it ends with status 0, and a
supervisor that restarts what has failed would leave it down: here the status is 1. When it is asked
to end while streams run, it ends the engine and then waits for the streams, which nobody ends: here
they get the error of a dead engine. Middleware sees the start and the end of the application, and
the renderer knows whether vLLM was asked to end.
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
        self._announcement: asyncio.Task[None] | None = (
            None  # a task lives as long as its name
        )

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


ENGINE_DIED = 1
POLL_SECONDS = 0.25


class ServerEnd:
    """Pass everything on, and watch the end of a server whose model is one of ours."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._watch: asyncio.Task[None] | None = (
            None  # a task lives as long as its name
        )

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request, or the start and end of the application."""
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return

        async def watched_send(message: Message) -> None:
            await send(message)
            state = scope["app"].state
            if message["type"] == "lifespan.startup.complete" and _is_ours(state):
                self._watch = asyncio.create_task(end_streams(state))

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self._watch is not None:
                self._watch.cancel()
                _set_status(scope["app"].state)
            return message

        await self.app(scope, watched_receive, watched_send)


def _is_ours(state: Any) -> bool:
    return state.vllm_config.model_config.architecture in FAMILIES


async def end_streams(state: Any) -> None:
    """Wait until vLLM has ended the engine, and give requests that still wait for it an error."""
    while not state.server.should_exit:
        await asyncio.sleep(POLL_SECONDS)
    state.engine_client.output_processor.propagate_error(state.engine_client.dead_error)


def _set_status(state: Any) -> None:
    """Exit with a status where the server ends without having been asked to."""
    engine = state.engine_client
    # vLLM ends the renderer first when it is asked to end, and marks the engine as dead then, too.
    if engine.errored and not engine.renderer.is_shut_down:
        print("diffuplug: the engine has died; the server ends.", file=sys.stderr)
        # Behind this call, and outside of it: servers keep what applications raise.
        asyncio.get_running_loop().call_soon(sys.exit, ENGINE_DIED)
