"""Compare the options of all ranks before they load, and end each rank that is asked to end.

A call that one rank refuses fails on all ranks of an engine, and only the last rank says so.
"""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import wraps
from multiprocessing.connection import wait
from typing import Any, TypeVar, cast

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from dllm_plugin.config.decode import refuse_unlike, shared_options

# vLLM kills a rank 4 s after SIGTERM, unless its engine fails to start.
END_SECONDS = 10.0
LOOK_SECONDS = 1.0  # between two looks for the parent
# Executors that raise the first error among the replies of all ranks.
ONE_ERROR = ("mp", "ray")
Call = TypeVar("Call", bound=Callable[..., Any])

logger = init_logger("vllm.dllm_plugin")


def compare_options(vllm_config: VllmConfig) -> None:
    """Raise ValueError on every rank if a rank decodes with other options than rank 0.

    Every node resolves its own command line, and vLLM compares nothing between nodes that
    `--nnodes` joins. `rows_at_once` follows from a node's GPUs: all ranks take the smallest, since
    they exchange results once for so many rows.
    """
    world = get_world_group()
    additional: Any = vllm_config.additional_config
    resolved = additional["dllm"]
    ours = (resolved["rows_at_once"], shared_options(vllm_config, with_sizes=True))
    ranks: list[Any] = [None] * world.world_size
    torch.distributed.all_gather_object(ranks, ours, group=world.cpu_group)
    resolved["rows_at_once"] = min(rows for rows, _ in ranks)
    _, first = ranks[0]
    for rank, (_, options) in enumerate(ranks):
        refuse_unlike(f"rank {rank}", options, "rank 0", first)


def end_at_sigterm(seconds: float = END_SECONDS) -> None:
    """End this process some seconds after SIGTERM or its parent's end, whatever it does then.

    vLLM's handler raises SystemExit once, which Python drops within a destructor or a callback of
    a weak reference, and it never runs while the main thread waits in a kernel for a dead rank.
    """
    parent = multiprocessing.parent_process()
    # An engine that runs its only rank itself has a handler that drains.
    if parent is None or not multiprocessing.current_process().daemon:
        return
    above = os.getppid()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())

    def end(writer: socket.socket) -> None:
        """Wait, and keep the writer, which would be closed without a reference."""
        # Ranks that were forked later keep the sentinels of earlier ranks open.
        while os.getppid() == above:
            found = wait([reader, parent.sentinel], LOOK_SECONDS)
            if parent.sentinel in found:
                break
            if reader in found and signal.SIGTERM in reader.recv(64):
                break
        time.sleep(seconds)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=end, args=(writer,), daemon=True).start()


class Agreement:
    """Let what is done within fail on all ranks of an engine if it fails on one.

    `is_silent`: log the error of this rank and drop it.
    """

    def __init__(self, is_silent: bool = False) -> None:
        self.is_silent = is_silent

    def __enter__(self) -> None:
        """Begin what may fail."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """Exchange reasons; raise ValueError if only others failed, unless silent."""
        if error is not None and not isinstance(error, Exception):
            return False
        reasons = exchange(reason_of(error))
        if error is not None and self.is_silent:
            logger.error("A call of all ranks failed on this one.", exc_info=error)
        elif reasons and error is None and not self.is_silent:
            raise ValueError(reasons[0])
        return self.is_silent


def reason_of(error: Exception | None) -> str | None:
    """Return the text of an error, with its type if it was not meant for a user."""
    if error is None:
        return None
    if isinstance(error, (ValueError, RuntimeError)):
        return str(error)
    return repr(error)


def exchange(reason: str | None) -> list[str]:
    """Return why ranks of this engine failed, in their order."""
    found = [reason]
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            ranks: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(ranks, found, group=group.cpu_group)
            found = sum(ranks, [])
    return [why for why in found if why is not None]


def fail_together(call: Call) -> Call:
    """Wrap a worker's method so that it fails on all ranks, of which one says why.

    vLLM's executors raise the first error, and leave the replies of later ranks where the next
    step or call finds them (its open pull request 57846).
    """

    @wraps(call)
    def wrapped(worker: "RankWorker", *args: Any, **kwargs: Any) -> Any:
        is_last = get_tp_group().is_last_rank and get_pp_group().is_last_rank
        executor = worker.parallel_config.distributed_executor_backend
        with Agreement(is_silent=executor in ONE_ERROR and not is_last):
            return call(worker, *args, **kwargs)
        return None

    return cast(Call, wrapped)


class RankWorker(Worker):
    """Run vLLM's worker as one of several ranks."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does, after a comparison of the ranks' options."""
        end_at_sigterm()
        if not load_dummy_weights:  # ranks that elastic scaling adds get a copy
            compare_options(self.vllm_config)
        super().load_model(load_dummy_weights=load_dummy_weights)

    @fail_together
    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded as vLLM does."""
        return super().pin_lora(lora_id)

    @fail_together
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect with a trainer as vLLM does."""
        super().init_weight_transfer_engine(init_info)

    @fail_together
    def shutdown_weight_transfer_engine(self) -> None:
        """Part from a trainer as vLLM does."""
        super().shutdown_weight_transfer_engine()

    @fail_together
    def compute_weight_checksums(self) -> dict[str, str]:
        """Compute a digest of each tensor as vLLM does."""
        return super().compute_weight_checksums()

    @fail_together
    def start_draft_weight_update(self) -> None:
        """Start an update of a draft model as vLLM does."""
        super().start_draft_weight_update()

    @fail_together
    def discard(self, tags: tuple[str, ...]) -> None:
        """Free memory as vLLM does."""
        super().discard(tags)

    @fail_together
    def profile(self, *args: Any, **kwargs: Any) -> None:
        """Start or stop the profiler as vLLM does."""
        super().profile(*args, **kwargs)

    def shared_options(self) -> dict[str, str]:
        """Return the options that a server compares with its own."""
        return shared_options(self.vllm_config, with_sizes=False)
