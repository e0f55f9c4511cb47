"""End a command at the first Ctrl-C, with every process that it has started.

Python's own KeyboardInterrupt does not do it: vLLM waits for an engine that is still starting, and
what is raised inside a callback is lost. Nothing of a command is worth a wait, so the processes are
killed.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import psutil  # type: ignore[import-untyped]

from dllm_plugin import COMMAND

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
# Removes leftovers of Python's shared memory, and then ends by itself.
CLEANER = "multiprocessing.resource_tracker"
# Warnings that a killed process causes there, and one that vLLM causes in each of its own.
SILENCED = (
    "ignore:resource_tracker:UserWarning",
    "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
)
WAIT_SECONDS = 0.5
_CLEAN_UPS: list[Callable[[], None]] = []


class StartError(Exception):
    """An engine did not start, for the reason in the message."""


def end_at_signals() -> None:
    """End this process at SIGINT and SIGTERM, unless its parent has it ignore the signal."""
    given = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join([*([given] if given else []), *SILENCED])
    os.environ[COMMAND] = str(os.getpid())
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: end_now(128 + received))


@contextmanager
def cleaning_up(clean_up: Callable[[], None]) -> Iterator[None]:
    """Call `clean_up` if a signal ends the process meanwhile."""
    _CLEAN_UPS.append(clean_up)
    try:
        yield
    finally:
        _CLEAN_UPS.remove(clean_up)


class Interrupts:
    """Watch for Ctrl-C in a process whose signal handlers are vLLM's.

    came  whether there was one
    """

    def __init__(self, seconds: float) -> None:
        """Start to watch; the process ends `seconds` after the first Ctrl-C, or at the second."""
        self.came = False
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        threading.Thread(target=self._watch, args=(read, seconds), daemon=True).start()

    def _watch(self, read: int, seconds: float) -> None:
        while received := os.read(read, 1):
            if received[0] != signal.SIGINT:
                continue
            if self.came:
                end_now(INTERRUPTED)
            self.came = True
            timer = threading.Timer(seconds, end_now, (INTERRUPTED,))
            timer.daemon = True
            timer.start()


def end_now(status: int) -> NoReturn:
    """Kill all processes below this one, and end it with a status."""
    # Other threads would report the processes that are killed.
    logging.disable()
    kill_children()
    for clean_up in reversed(_CLEAN_UPS):
        clean_up()
    os._exit(status)


def kill_children() -> None:
    """Kill all processes below this one, and wait until they have ended.

    They are suspended first: a process that is still starting would miss its parent, and print a
    traceback.
    """
    found: list[psutil.Process] = []
    while new := _children(found):
        for process in new:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        found += new
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end and any(map(_runs, found)):
        time.sleep(0.01)


def _children(known: list[psutil.Process]) -> list[psutil.Process]:
    """Return the other processes below this one that run, but for Python's cleaner."""
    children = psutil.Process().children(recursive=True)
    others = [process for process in children if process not in known]
    return [process for process in others if not _is_cleaner(process)]


def _runs(process: psutil.Process) -> bool:
    """Return whether a process still runs, and is not only waited for."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_cleaner(process: psutil.Process) -> bool:
    try:
        return any(CLEANER in word for word in process.cmdline())
    except psutil.Error:
        return False
