"""End ``diffuplug serve`` so that clients and supervisors see what happened.

vLLM's server does so but for two things. When its engine has died it ends with status 0, and a
supervisor that restarts what has failed would leave it down: here the status is 1. When it is asked
to end while streams run, it ends the engine and then waits for the streams, which nobody ends: here
they get the error of a dead engine. Middleware sees the start and the end of the application, and
the renderer knows whether vLLM was asked to end.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dllm_plugin.decoding.families import FAMILIES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

ENGINE_DIED = 1
POLL_SECONDS = 0.25


class ServerEnd:
    """Pass everything on, and watch the end of a server whose model is one of ours."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._watch: asyncio.Task[None] | None = None  # a task lives as long as its name

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
