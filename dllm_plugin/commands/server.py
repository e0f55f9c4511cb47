"""Run vLLM's server in this process, and watch its start and its end.

Whatever keeps the server from starting becomes one sentence. When it accepts connections, a
line says where. When it is asked to end, running streams may go on for a while; those that are
cut get an error with a sentence. After a Ctrl-C that takes 3 s at most, and a second one ends
the server at once. If its engine, or the coordinator of several, dies, the server ends with
status 1, so that a supervisor starts it again.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NoReturn

import uvloop
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import CONFIG_MAPPING
from vllm import ModelRegistry
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.exceptions import VLLMValidationError
from vllm.logger import configure_logging_from_args
from vllm.plugins import load_general_plugins
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import decorate_logs

from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.options import OPTIONS
from dllm_plugin.config.validation import did_you_mean
from dllm_plugin.decoding.families import FAMILIES

from .interrupts import INTERRUPTED, TERMINATED, Interrupts, end_now
from .models import architecture_of, read_config, why_unserved
from .options import check_word, flag_of
from .phases import end_start, is_quiet, quieten, start_log
from .server_end import CUT, DIED, GRACE_SECONDS, POLL_SECONDS, End

MIDDLEWARE = "dllm_plugin.commands.server.Lifecycle"
DRAIN_SECONDS = 10  # for running requests, once the server is asked to end
UNRECOGNIZED = "unrecognized arguments: "
ANY_ADDRESS = {"": "localhost", "0.0.0.0": "localhost", "::": "localhost"}
VIEWER, HEALTH = "/viewer", ("/health", "/ready")
# Streams that vLLM makes of a chat's, in whose events it cannot read the chat's error.
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
EVENT = b"event: "
ENDING = "The server is ending and takes no new requests; send it again when the server is back."
# After a first Ctrl-C; all processes of several servers take long to kill.
SEVERAL_SECONDS = 2.0
THREADS_END = "after shutdown"  # of the renderer, in Python's words


class ServerParser(FlexibleArgumentParser):
    """Parse the options of `vllm serve`; raise ValueError if one is wrong."""

    known: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        """Raise ValueError in place of printing vLLM's usage."""
        if not message.startswith(UNRECOGNIZED):
            raise ValueError(message)
        words = message.removeprefix(UNRECOGNIZED).split()
        word = words[0].partition("=")[0]
        if not word.startswith("-"):
            raise ValueError(
                f"{word} is one argument too many: the model comes first, or after --model"
            )
        known = (*ServerParser.known, *map(flag_of, OPTIONS))
        raise ValueError(f"there is no option {word}{did_you_mean(word, known)}")


def serve(arguments: Sequence[str], model: str | None = None) -> int:
    """Serve until somebody ends the server. Raises ValueError for wrong options.

    Args:
        model: whose architecture is checked; None if only vLLM can read it.
    """
    # What the command `vllm` sets: the safest way to start processes.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    parser = ServerParser(prog="diffuplug")
    command = ServeSubcommand()
    served = command.subparser_init(parser.add_subparsers(dest="subparser"))
    ServerParser.known = tuple(served._option_string_actions)
    served.set_defaults(shutdown_timeout=DRAIN_SECONDS)
    if not sys.stderr.isatty():
        served.set_defaults(use_tqdm_on_load=False)
    args = parser.parse_args(["serve", *arguments])
    if model is not None and not args.trust_remote_code:
        refuse_unknown(model)
    if not args.headless:  # which serves no requests
        args.middleware = [MIDDLEWARE, *args.middleware]
    configure_logging_from_args(args)
    quieten()
    command.validate(args)
    check_parsers(args)
    # The parent of several servers has no application that would take the signal.
    several = (args.api_server_count or args.data_parallel_size) > 1
    interrupts = Interrupts(SEVERAL_SECONDS) if several else None
    # Their start is not announced.
    rust = os.environ.get("VLLM_USE_RUST_FRONTEND")
    others = args.headless or vars(args).get("grpc") or rust
    others = others or args.data_parallel_multi_port_external_lb
    alone = not (several or others) and args.api_server_count != 0
    try:
        with start_log(alone and is_quiet()):
            if alone:
                uvloop.run(serve_alone(args))
            else:
                command.cmd(args)
    except KeyboardInterrupt:  # what vLLM makes of SIGTERM while it starts
        end_now(TERMINATED)
    finally:
        if interrupts is not None and interrupts.came:
            end_now(INTERRUPTED)
    # A node without a server ends by a signal, or because a process of it has died.
    return DIED if args.headless else 0


async def serve_alone(args: argparse.Namespace) -> None:
    """Run vLLM's only server of a command as `vllm serve` does, but end at SIGTERM while it starts.

    vLLM's handler raises KeyboardInterrupt, after which its wait for the engine was seen to go on.
    Without that handler the command's own one ends the process until the server accepts requests.
    """
    args.model = args.model_tag or args.model
    args.api_server_count = None
    decorate_logs("APIServer", skip_if_decorated=True)
    address, listening = setup_server(args, reuse_port=False)
    await run_server_worker(address, listening, args)


def check_parsers(args: argparse.Namespace) -> None:
    """Raise ValueError for a parser of tools or of reasoning that vLLM does not know."""
    if args.tool_parser_plugin or args.reasoning_parser_plugin:
        return  # which vLLM loads later
    for option, manager in (
        ("tool_call_parser", ToolParserManager),
        ("reasoning_parser", ReasoningParserManager),
    ):
        if name := getattr(args, option):
            check_word(flag_of(option), name, manager.list_registered())


def refuse_unknown(model: str) -> None:
    """Raise ValueError for a model that DiffuPlug, vLLM, its plugins and transformers lack.

    vLLM would ask for trust in the checkpoint's own code.
    """
    load_general_plugins()
    config = read_config(model)
    known = architecture_of(config) in ModelRegistry.get_supported_archs()
    # Of other architectures vLLM can run what transformers has.
    if not known and config.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"{why_unserved(model, config)}; vLLM does not serve it either"
        )


class Lifecycle:
    """Pass every request on, and watch the start and the end of the application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the start and end of the application."""
        if scope["type"] != "lifespan":
            await self.handle(scope, receive, send)
            return
        state = scope["app"].state
        state.lifecycle = end = End(state)
        tasks = []

        async def sending(message: Message) -> None:
            begins = message["type"] == "lifespan.startup.complete"
            if begins:
                await end.compare_hosts()
            await send(message)
            if begins:
                # Requests that an engine has left without an answer would keep the server.
                state.server.config.timeout_graceful_shutdown = GRACE_SECONDS
                tasks.append(asyncio.create_task(end.cut_streams()))
                tasks.append(asyncio.create_task(end.watch_coordinator()))
                tasks.append(asyncio.create_task(end.watch_other_hosts()))
                # In the place of vLLM, which handles it as SIGTERM.
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGINT, end.interrupt)
                if is_first(state):
                    tasks.append(asyncio.create_task(announce(scope["app"])))

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                end.set_status()
            return message

        await self.app(scope, receiving, sending)
        if end.interrupted:
            end_now(INTERRUPTED)
        for task in tasks:
            task.cancel()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse a new request while running requests end.

        `/health` and `/ready` then fail, so that balancers send no more requests.
        """
        if scope["type"] == "http" and (
            scope["method"] == "POST" or scope["path"].endswith(HEALTH)
        ):
            end: End | None = scope["app"].state.lifecycle
            if end is not None:
                if end.is_asked_for():
                    await ending_reply()(scope, receive, send)
                else:
                    await self.handle_until_end(scope, receive, send, end)
                return
        await self.app(scope, receive, send)

    async def handle_until_end(
        self, scope: Scope, receive: Receive, send: Send, end: End
    ) -> None:
        """Pass a request on; refuse it if the renderer ends before it has read the request."""
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if scope["path"].endswith((MESSAGES, RESPONSES)):
                await self.handle_until_cut(scope, receive, sending, end.is_cut)
            else:
                await self.app(scope, receive, sending)
        except RuntimeError as error:
            if started or not end.is_asked_for() or THREADS_END not in str(error):
                raise
            await ending_reply()(scope, receive, send)

    async def handle_until_cut(
        self, scope: Scope, receive: Receive, send: Send, cut: asyncio.Event
    ) -> None:
        """Pass a request on; end a stream that is cut, or refused, with an event of its kind."""
        number, streams, why = 0, False, CUT

        async def counting(message: Message) -> None:
            nonlocal number, streams
            number += message.get("body", b"").count(EVENT)
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            streams = streams or kind.startswith(b"text/event-stream")
            await send(message)

        running = asyncio.ensure_future(self.app(scope, receive, counting))
        waiting = asyncio.ensure_future(cut.wait())
        try:
            await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
            if running.done() or not streams:
                await running
                return
            running.cancel()
            await asyncio.wait((running,))
        except RuntimeError as error:  # a refusal after the first event
            if not isinstance(error.__cause__, VLLMValidationError):
                raise
            why = str(error.__cause__)
        finally:
            running.cancel()
            waiting.cancel()
        body = error_event(scope["path"], number, why)
        await send({"type": "http.response.body", "body": body})


def error_event(path: str, number: int, why: str) -> bytes:
    """Return the event that ends a stream after `number` events, and says why."""
    kinds = "overloaded_error", "server_error"
    ours, code = kinds if why == CUT else ("invalid_request_error",) * 2
    error: dict[str, Any] = {"type": "error", "message": why}
    if path.endswith(MESSAGES):
        error = {"type": "error", "error": error | {"type": ours}}
    else:
        error |= {"code": code, "param": None, "sequence_number": number}
    return EVENT + f"error\ndata: {json.dumps(error)}\n\n".encode()


def ending_reply() -> JSONResponse:
    """Return the reply to requests that come while the server ends."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    error = {"message": ENDING, "type": "ServiceUnavailableError", "code": status}
    return JSONResponse({"error": error}, status, {"Connection": "close"})


def is_first(state: Any) -> bool:
    """Return whether this is the first, or the only one, of the processes that serve."""
    return bool(state.vllm_config.parallel_config._api_process_rank <= 0)


async def announce(app: Any) -> None:
    """Print the ready line when the server accepts connections, which it does after its start."""
    while not app.state.server.started:
        await asyncio.sleep(POLL_SECONDS)
    paths = [getattr(route, "path", None) for route in app.routes]
    end_start()
    print(ready_line(app.state, VIEWER in paths), file=sys.stderr, flush=True)


def ready_line(state: Any, has_viewer: bool) -> str:
    """Format address, model and abilities, from what vLLM keeps about its server."""
    arguments, config = state.args, state.vllm_config
    host = ANY_ADDRESS.get(arguments.host or "", arguments.host)
    if ":" in host:  # an IPv6 address
        host = f"[{host}]"
    scheme = "https" if arguments.ssl_certfile else "http"
    address = arguments.uds or f"{scheme}://{host}:{arguments.port}"
    viewer = f" (viewer: {address}{VIEWER})" if has_viewer and not arguments.uds else ""
    names = config.model_config.served_model_name
    model = names if isinstance(names, str) else names[0]
    return f"diffuplug: ready at {address}{viewer}, model {model}, {_abilities(config)}"


def _abilities(vllm_config: Any) -> str:
    """Describe how the model decodes, and what clients can ask for because of it."""
    if vllm_config.model_config.architecture not in FAMILIES:
        return "decoding as vLLM does"
    config = get_decode_config(vllm_config)
    able = ["chat", "completions"]
    if not config.no_grammars:
        able.append("structured output")
    if config.method.full_attention:
        able += ["infilling", "likelihoods"]
    return (
        f"decoding {config.strategy} with policy {config.policy}; can do "
        f"{', '.join(able[:-1])} and {able[-1]}"
    )
