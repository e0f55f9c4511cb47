"""Let vLLM's processes sleep until a message comes, for those of a test run share few cores.

vLLM keeps its readers awake for a second after each message: in steps without a pause, always.
"""

from functools import partial


def sleep_between_messages() -> None:
    """From now on, in this process and its forks."""
    from vllm.distributed.device_communicators import shm_broadcast

    asleep = partial(shm_broadcast.SpinCondition, busy_loop_s=0.0)
    shm_broadcast.SpinCondition = asleep  # type: ignore[misc, assignment]
