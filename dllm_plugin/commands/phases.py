"""Show the phase of a command, while a file stores what vLLM prints."""

import logging
import os
import re
import select
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console
from rich.status import Status

from .interrupts import StartError, cleaning_up

# What vLLM logs when a phase of its start begins, in order; a test finds them in its source.
MARKERS = {
    "Initializing a V1 LLM engine": "starting the engine",
    "Loading model from scratch": "loading the model",
    "Model loading took": "warming up",
}
# What vLLM says of more ranks than NUMA nodes: each would have the cores of one.
BINDING = "Not enough allowed NUMA nodes"
FIRST = "starting vLLM"
LOOK_SECONDS = 0.2
WAIT_SECONDS = 0.25  # for pipes that Python's resource tracker keeps open
PIPE_BYTES = 1 << 16
SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"
OF_DRAFTS = "SpecDecoding metrics"  # numbers that mean nothing here
_ERROR = re.compile(r"\b[\w.]*(?:Error|Exception): (.+)")
_STARTING: list["StartLog"] = []
_FAILURE = re.compile(rb"\bERROR\b|^Traceback", re.MULTILINE)
# Errors that only say that there was another error.
_CONSEQUENCES = (
    "initialization failed",
    "root cause",
    "Cancelled",
    "EngineCore encountered",
)


class Screen:
    """Show one phase at a time: a spinner on a terminal, a line each elsewhere.

    `err` takes the phases and `out` the results. While the screen is entered, a thread reads `log`
    and shows the phases of vLLM's start that it finds there.
    """

    def __init__(self, err: TextIO, out: TextIO, log: Path | None) -> None:
        self.out = out
        self.log = log
        self.err = err
        self._console = Console(file=err, highlight=False)
        self.is_terminal = self._console.is_terminal
        self._start = self._since = time.monotonic()
        self._spinner: Status | None = None
        self._lock = threading.RLock()
        self._leave = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.phase(FIRST)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def phase(self, text: str) -> None:
        """Begin a phase; the one before is over."""
        with self._lock:
            self._finish()
            if self.is_terminal:
                self._since = time.monotonic()
                self._spinner = self._console.status(text, spinner="line")
                self._spinner.start()
            else:
                self._line(text, self._start)

    def end(self, text: str | None = None) -> None:
        """End the last phase, with a line that says so; the log is not read any further."""
        self._leave.set()
        self._watcher.join()
        with self._lock:
            self._finish()
            if text is not None:
                self._line(text, self._start)

    def note(self, text: str) -> None:
        """Write a line that is no result."""
        self.err.write(text + "\n")
        self.err.flush()

    def _line(self, text: str, since: float) -> None:
        self.note(f"[{time.monotonic() - since:3.0f} s] {text}")

    def _finish(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._line(str(self._spinner.status), self._since)
            self._spinner = None

    def _watch(self) -> None:
        if self.log is None:
            return
        waiting, text = dict(MARKERS), ""
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            while not self._leave.wait(LOOK_SECONDS):
                text += lines.read()  # a marker may come in two pieces
                found = [marker for marker in waiting if marker in text]
                for marker in found:
                    self.phase(waiting.pop(marker))


def why_not_started(error: Exception, log: Path | None) -> str:
    """Describe why an engine did not start, by its log, if there is one, else by `error`."""
    found = None if log is None else cause(log)
    reason = f"{error}" if found is None else f"cause: {found}"
    if BINDING in reason:
        reason += " VLLM_CPU_OMP_THREADS_BIND=nobind binds none."
    elif log is None:
        return f"the engine did not start ({reason}); the cause is above"
    return f"the engine did not start ({reason})"


@contextmanager
def screen(verbose: bool) -> Iterator[Screen]:
    """Send what this process and its children print to a file, and yield the screen.

    The file is removed when all went well and its path printed when not. With `verbose` there is no
    file: everything comes out on standard error.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    streams = [_opened(number) for number in (1, 2)]
    with _duplicate(1, streams[0]) as out, _duplicate(2, streams[1]) as err:
        if verbose:
            with Screen(err, out, None) as shown:
                yield shown
            return
        descriptor, name = tempfile.mkstemp(prefix="diffuplug-", suffix=".log")
        log = Path(name)
        done = False
        try:
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            clean_up = partial(_clean_up, log, err)
            with cleaning_up(clean_up), Screen(err, out, log) as shown:
                yield shown
            done = True
        except BrokenPipeError:  # of the output, or of one that vLLM has inside
            done = reader_has_gone(out.fileno()) or reader_has_gone(err.fileno())
            raise
        finally:
            for standard in streams:
                standard.flush()
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.close(descriptor)
            if done:
                log.unlink()
            else:
                err.write(f"diffuplug: vLLM's log: {log}\n")


def _clean_up(log: Path, err: TextIO) -> None:
    """Remove the log of a command that a signal ends, and show the cursor that a spinner hid."""
    log.unlink(missing_ok=True)
    if err.isatty():
        os.write(err.fileno(), SHOW_CURSOR)


def reader_has_gone(descriptor: int) -> bool:
    """Return whether a descriptor is a pipe, or a socket, that nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _opened(number: int) -> TextIO:
    """Return standard output or error, opened on nothing if it was closed."""
    name = {1: "stdout", 2: "stderr"}[number]
    if getattr(sys, name) is None:
        open_nowhere(number)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    stream: TextIO = getattr(sys, name)
    stream.flush()
    return stream


def open_nowhere(number: int) -> None:
    """Open a descriptor on nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def _duplicate(number: int, stream: TextIO) -> TextIO:
    """Open a copy of a descriptor that writes text as the stream does."""
    return os.fdopen(
        os.dup(number), "w", encoding=stream.encoding, errors=stream.errors
    )


def cause(log: Path) -> str | None:
    """Return the message of the last error in a log that is no consequence of another error."""
    found = None
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _ERROR.search(line)
        if match and not any(words in line for words in _CONSEQUENCES):
            found = match[1].strip()
    return found


class StartLog:
    """Pass on what a starting server and its children print, up to the first error.

    vLLM prints 150 lines about an engine that does not start, with the cause amid them.
    """

    def __init__(self) -> None:
        """Put a pipe in place of standard output and of standard error."""
        self.is_over = False
        self._kept = b""
        self._lock = threading.Lock()
        self._streams = {number: os.dup(number) for number in (1, 2)}
        self._pipes = {}
        for number, stream in self._streams.items():
            read, write = os.pipe()
            os.set_blocking(read, False)
            os.dup2(write, number)
            os.close(write)
            self._pipes[read] = stream
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Print what was kept, and from now on everything at once."""
        for number, stream in self._streams.items():
            os.dup2(stream, number)
        # The thread may end with the process before it reads what was printed last.
        self._read()
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            _write(2, self._kept)

    def keep(self) -> Path:
        """Return a file with what was kept in place of printing it; the children have ended."""
        descriptor, name = tempfile.mkstemp(prefix="diffuplug-", suffix=".log")
        for number, stream in self._streams.items():
            os.dup2(stream, number)
        self._thread.join(WAIT_SECONDS)
        with self._lock:
            _write(descriptor, self._kept)
            self._kept = b""
        os.close(descriptor)
        return Path(name)

    def _pass_on(self) -> None:
        while self._pipes:
            select.select([*self._pipes], [], [])
            self._read()

    def _read(self) -> None:
        """Pass on what the pipes have, standard output first: it may be older than an error."""
        with self._lock:
            for read, stream in list(self._pipes.items()):
                with suppress(BlockingIOError):
                    while text := os.read(read, PIPE_BYTES):
                        if not self.is_over and (self._kept or _FAILURE.search(text)):
                            self._kept += text
                        else:
                            _write(stream, text)
                    del self._pipes[read]  # all who wrote to it have ended


def _write(descriptor: int, text: bytes) -> None:
    """Write bytes, or nothing if nobody reads them any more."""
    with suppress(OSError):
        os.write(descriptor, text)


@contextmanager
def start_log(keeps: bool) -> Iterator[None]:
    """Raise StartError, if `keeps`, for an engine that does not start."""
    log = StartLog() if keeps else None
    if log is not None:
        _STARTING.append(log)
    try:
        yield
    except RuntimeError as error:
        if log is None or log.is_over:
            raise
        file = log.keep()
        print(f"diffuplug: vLLM's log: {file}", file=sys.stderr)
        raise StartError(why_not_started(error, file)) from error
    finally:
        end_start()


def end_start() -> None:
    """Print what was kept of the start, and from now on everything at once."""
    while _STARTING:
        _STARTING.pop().end()


def is_quiet() -> bool:
    """Return whether vLLM logs only warnings, which is our default."""
    return os.environ.get("VLLM_LOGGING_LEVEL") == "WARNING"


def quieten() -> None:
    """Print what DiffuPlug logs in place of what vLLM and uvicorn repeat."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("diffuplug: %(message)s"))
    logger = logging.getLogger("diffuplug")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if is_quiet():
        uvicorn = logging.getLogger("uvicorn.error")
        uvicorn.addFilter(lambda record: record.levelno > logging.INFO)
    rates = logging.getLogger("vllm.v1.metrics.loggers")
    rates.addFilter(lambda record: not str(record.msg).startswith(OF_DRAFTS))
