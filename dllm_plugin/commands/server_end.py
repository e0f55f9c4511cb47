"""End a server so that its clients and supervisors see what happened."""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from http import HTTPStatus
from typing import Any

from vllm import envs
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMServerError

from dllm_plugin.config.decode import refuse_unlike, shared_options
from dllm_plugin.decoding.families import FAMILIES

from .interrupts import INTERRUPTED, end_now

POLL_SECONDS = 0.05
DIED = 1  # the status if an engine, or what engines depend on, has died
CUT = (
    "The server is ending and cut this request; send it again when the server is back."
)
CUT_SECONDS, END_SECONDS = 2.0, 2.3  # after a first Ctrl-C
KILL_SECONDS = 0.8  # between the error of cut streams and the end of their engine
GRACE_SECONDS = 3  # for answers, once no more requests are taken
LOOK_SECONDS = 5.0  # between questions to engines on other hosts
COORDINATOR = "VLLM_DP_Coordinator"  # vLLM's name of the process


class ServerEnds(GracefulHTTPError, RetryableRequestError):
    """A request is cut because the server ends.

    vLLM's engine client passes the first kind of error on as it is, and its streams write the
    second without a traceback in the log.
    """

    def __init__(self) -> None:
        super().__init__(CUT, HTTPStatus.SERVICE_UNAVAILABLE)


class End:
    """End a server so that its clients and supervisors see what happened."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.interrupted = False
        self.died = ""  # what has, except an engine of this host
        self.is_cut = asyncio.Event()

    def interrupt(self) -> None:
        """Let running streams go on for a short while; end at once at the second call."""
        if self.interrupted:
            end_now(INTERRUPTED)
        self.interrupted = True
        running = self.state.engine_client.get_num_unfinished_requests()
        if not running:
            end_now(INTERRUPTED)
        print(
            f"diffuplug: running requests have {CUT_SECONDS} s to end ({running} are "
            "left); Ctrl-C again cuts them now.",
            file=sys.stderr,
        )
        asyncio.get_running_loop().call_later(CUT_SECONDS, self.cut)
        # In a thread, since a loop with a backlog of outputs does not turn in time.
        timer = threading.Timer(END_SECONDS, end_now, (INTERRUPTED,))
        timer.daemon = True
        timer.start()
        os.kill(os.getpid(), signal.SIGTERM)  # vLLM lets requests run after this one

    def cut(self) -> None:
        """End requests that still run with an error."""
        self.is_cut.set()
        processor = self.state.engine_client.output_processor
        # Streams that end with events of their own have ended by then.
        loop = asyncio.get_running_loop()
        loop.call_later(POLL_SECONDS, processor.propagate_error, ServerEnds())

    async def cut_streams(self) -> None:
        """Cut streams shortly before vLLM kills the engine, whose end would be their error."""
        loop = asyncio.get_running_loop()
        server = self.state.server
        while not (server.should_exit or self.is_asked_for()):
            await asyncio.sleep(POLL_SECONDS)
        end = loop.time() + self.state.vllm_config.shutdown_timeout - KILL_SECONDS
        while not server.should_exit and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        self.cut()

    def has_our_model(self) -> bool:
        """Return whether the renderer is ours, which knows of its end."""
        return self.state.vllm_config.model_config.architecture in FAMILIES

    def is_asked_for(self) -> bool:
        """Return whether vLLM was asked to end, which ends the renderer first."""
        return self.has_our_model() and self.state.engine_client.renderer.is_shut_down

    async def watch_coordinator(self) -> None:
        """End the server if the coordinator of its data-parallel engines dies.

        Engines of a mixture would wait for each other; several servers watch it themselves.
        """
        children = multiprocessing.active_children()
        coordinators = [child for child in children if child.name == COORDINATOR]
        if not (coordinators and self.has_our_model()):
            return
        while coordinators[0].is_alive():
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.sleep(POLL_SECONDS)  # a signal to all processes comes here too
        self.end_without("coordinator of the engines")

    async def watch_other_hosts(self) -> None:
        """End the server if an engine of another host no longer answers.

        vLLM watches processes of this host, and its clients would wait.
        """
        if not self.has_other_hosts():
            return
        client = self.state.engine_client
        limit = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        answers = True
        while answers:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                async with asyncio.timeout(limit):
                    await client.is_sleeping()
            except RuntimeError:  # only some sleep
                continue
            except VLLMServerError:  # an engine here has died
                return
            except TimeoutError:
                answers = False
        self.end_without("engine of another host")

    def has_other_hosts(self) -> bool:
        """Return whether the server sends requests to engines of other hosts."""
        parallel = self.state.vllm_config.parallel_config
        if not self.has_our_model() or parallel.local_engines_only:
            return False
        return bool(parallel.data_parallel_size > parallel.data_parallel_size_local)

    async def compare_hosts(self) -> None:
        """End the server if an engine of another host has other options."""
        if not self.has_other_hosts():
            return
        engines = self.state.engine_client.engine_core
        ours = shared_options(self.state.vllm_config, with_sizes=False)
        found = await engines.call_utility_all_async("collective_rpc", "shared_options")
        try:
            for replica, ranks in enumerate(found):
                refuse_unlike(f"replica {replica}", ranks[0], "this server", ours)
        except ValueError as error:
            print(f"diffuplug: error: {error}", file=sys.stderr)
            end_now(DIED)

    def end_without(self, what: str) -> None:
        """End the server because `what` has died, unless it ends already."""
        ends = self.interrupted or self.is_asked_for()
        if not (ends or self.state.engine_client.errored):
            self.died = what
            self.cut()
            os.kill(os.getpid(), signal.SIGTERM)

    def set_status(self) -> None:
        """Exit with status 1 if the server ends because a process of its own has died."""
        died = self.died
        ends = self.interrupted or not self.has_our_model() or self.is_asked_for()
        if self.state.engine_client.errored and not ends:
            died = "engine"
        if died:
            print(f"diffuplug: the {died} has died; the server ends.", file=sys.stderr)
            # After this call, and outside of it: servers keep what applications raise.
            asyncio.get_running_loop().call_soon(sys.exit, DIED)
