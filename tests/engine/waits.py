"""Let vLLM's processes sleep until a message comes, for those of a test run share few cores.

vLLM keeps its readers awake for a second after each message: in steps without a pause, always. A
reader that sleeps misses a notice that follows another within a millisecond (ZeroMQ drops it), and
would look for its message only after 5 s.
"""

from functools import partial

RECHECK_MS = 25  # a look takes some 0.05 ms


def sleep_between_messages() -> None:
    """From now on, in this process and its forks."""
    from vllm.distributed.device_communicators import shm_broadcast

    asleep = partial(shm_broadcast.SpinCondition, busy_loop_s=0.0)
    shm_broadcast.SpinCondition = asleep  # type: ignore[misc, assignment]
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
