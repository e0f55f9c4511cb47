"""Make a fork of the template the process that its stand-in stands for."""

import atexit
import contextlib
import fcntl
import importlib
import os
import runpy
import signal
import sys
import tempfile
import threading
import types
from typing import Any, NoReturn

from preload import KEPT

HARMLESS = {"-B", "-s", "-u"}  # options of Python's
PLACE = (
    "GOMP_CPU_AFFINITY"  # read when OpenMP is loaded, which then binds the first thread
)


def program_of(arguments: list[str]) -> list[str]:
    """What Python is asked to run, behind options that change nothing; empty if it is more."""
    while arguments and arguments[0] in HARMLESS:
        arguments = arguments[1:]
    if len(arguments) > 1 and arguments[0] in ("-c", "-m"):
        return arguments
    return arguments if arguments and not arguments[0].startswith("-") else []


def take_over(request: dict[str, Any], came: list[int], path: list[str]) -> None:
    """Give this process all that the stand-in had."""
    places: list[int] = request["descriptors"]
    above = max([*places, *came, 2]) + 1
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in came]
    for descriptor in came:
        os.close(descriptor)
    for place, descriptor in zip(places, high, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    for number in {0, 1, 2} - {*places}:
        os.close(number)
    os.chdir(request["folder"])
    os.environ.clear()
    KEPT.clear()
    KEPT.update(request["environment"])
    bound = os.environ.get(PLACE)
    os.sched_setaffinity(0, request["cores"] if bound is None else [int(bound)])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    more = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [*filter(None, more.split(os.pathsep)), *path]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    unbuffered = (
        bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in request["arguments"]
    )
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        lines = not unbuffered and (number == 2 or os.isatty(number))
        stream.reconfigure(line_buffering=lines, write_through=unbuffered)
    import torch
    from prometheus_client import values

    values.ValueClass = values.get_value_class()  # by PROMETHEUS_MULTIPROC_DIR
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdigit() else len(request["cores"]))


def run(arguments: list[str]) -> None:
    """Run a module, a script or code as `python` does."""
    kind, *rest = program_of(arguments)
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(main_module()))
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        sys.argv = [kind, *rest]
        module = main_module()
        module.__file__ = os.path.abspath(
            kind
        )  # processes that it spawns read it again
        with open(kind, "rb") as file:
            exec(compile(file.read(), module.__file__, "exec"), vars(module))


def main_module() -> types.ModuleType:
    """An empty `__main__`."""
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    return module


def end_of(arguments: list[str]) -> NoReturn:
    """Run, and end with the status of Python, without taking all of vLLM apart at the end."""
    status = 0
    try:
        run(arguments)
    except SystemExit as error:
        if error.code is not None:
            status = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined] - wait for threads, as multiprocessing does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 255)
