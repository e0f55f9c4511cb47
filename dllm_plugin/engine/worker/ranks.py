"""Compare the options of all ranks before they load, and end each rank that is asked to end."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing.connection import wait
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.worker.gpu_worker import Worker

from dllm_plugin import __version__

# vLLM kills a rank 4 s after SIGTERM, unless its engine fails to start.
END_SECONDS = 10.0
LOOK_SECONDS = 1.0  # between two looks for the parent


def compare_options(vllm_config: VllmConfig) -> None:
    """Raise ValueError on every rank if a rank decodes with other options than rank 0.

    Every node resolves its own command line, and vLLM compares nothing between nodes that
    `--nnodes` joins. `rows_at_once` follows from a node's GPUs: all ranks take the smallest, since
    they exchange results once for so many rows.
    """
    world = get_world_group()
    additional: Any = vllm_config.additional_config
    resolved = additional["dllm"]
    ranks: list[dict[str, Any]] = [{} for _ in range(world.world_size)]
    ours = shared_options(vllm_config)
    torch.distributed.all_gather_object(ranks, ours, group=world.cpu_group)
    own = resolved["rows_at_once"]
    pieces = [one.pop("rows_at_once", own) for one in ranks]
    resolved["rows_at_once"] = min(pieces)
    first = ranks[0]
    for rank, options in enumerate(ranks):
        for name in first | options:
            value, expected = options.get(name), first.get(name)
            if value != expected:
                raise ValueError(
                    f"rank {rank} was started with {name} {value!r}, rank 0 with "
                    f"{expected!r}: start DiffuPlug with the same options and version on "
                    "every node, this option too if their GPUs differ."
                )


def shared_options(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the options that ranks must share: ours, and those that decide a step's sizes.

    Defaults of vLLM's follow from the memory of a node's GPUs.
    """
    additional: Any = vllm_config.additional_config
    resolved = additional["dllm"]
    ours = resolved | resolved["defaults"] | {"defaults": None}
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    compilation = vllm_config.compilation_config
    sizes = {
        "version": __version__,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_cudagraph_capture_size": compilation.max_cudagraph_capture_size,
    }
    return sizes | ours


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


class RankWorker(Worker):
    """Run vLLM's worker as one of several ranks."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does, after a comparison of the ranks' options."""
        end_at_sigterm()
        if not load_dummy_weights:  # ranks that elastic scaling adds get a copy
            compare_options(self.vllm_config)
        super().load_model(load_dummy_weights=load_dummy_weights)
