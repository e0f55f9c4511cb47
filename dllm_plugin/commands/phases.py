"""Show the phase of a command, while a file stores what vLLM prints."""

import os
import re
import select
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console
from rich.status import Status

from dllm_plugin.commands.interrupts import cleaning_up

# What vLLM logs when a phase of its start begins, in order; a test finds them in its source.
MARKERS = {
    "Initializing a V1 LLM engine": "starting the engine",
    "Loading model from scratch": "loading the model",
    "Model loading took": "warming up",
}
FIRST = "starting vLLM"
LOOK_SECONDS = 0.2
SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"
_ERROR = re.compile(r"\b[\w.]*(?:Error|Exception): (.+)")
# Errors that only say that there was another one.
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
    """Return standard output or error, opened on nothing where it was closed."""
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
    """Return the message of the last error in a log that is no consequence of another one."""
    found = None
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _ERROR.search(line)
        if match and not any(words in line for words in _CONSEQUENCES):
            found = match[1].strip()
    return found
