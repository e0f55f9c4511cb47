"""Print what a test run spent besides its tests: engine starts, and imports of vLLM.

Printed as three sums at the end. A process counts as an import of vLLM when vLLM's compiled code is
mapped into it.
"""

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

PROC = Path("/proc")
EVERY = 0.5  # seconds; to import vLLM takes several
COMPILED = "/vllm/_C"


def engine_starts() -> list[float]:
    """Seconds of each start in this process."""
    engines = sys.modules.get("engines")
    return list(engines.STARTS) if engines else []


def register(config: pytest.Config) -> None:
    """Register the plugin: a worker of xdist reports to the process that started it."""
    output = getattr(config, "workeroutput", None)
    config.pluginmanager.register(Worker(output) if output is not None else Sums())


class Worker:
    """Hands its engine starts to the controller."""

    def __init__(self, output: dict[str, Any]) -> None:
        self.output = output

    def pytest_sessionfinish(self) -> None:
        self.output["engine_starts"] = engine_starts()


class Sums:
    """Collects what workers report, watches processes, and prints."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.seconds = 0.0
        self.imported: set[int] = set()  # process ids
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)

    def pytest_sessionstart(self) -> None:
        if PROC.is_dir():
            self.watcher.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.starts += getattr(node, "workeroutput", {}).get("engine_starts", [])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self.ended.set()
        starts = self.starts + engine_starts()
        terminalreporter.write_line(
            f"tests took {self.seconds:.0f} s in all; {len(starts)} engine starts in their own "
            f"processes {sum(starts):.0f} s of it; {len(self.imported)} processes "
            "imported vLLM"
        )

    def _watch(self) -> None:
        while not self.ended.wait(EVERY):
            for process in _descendants(_parents()):
                if process not in self.imported and _maps_vllm(process):
                    self.imported.add(process)


def _parents() -> dict[int, int]:
    """Parent of each process."""
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = int(fields[1])
    return found


def _descendants(parents: dict[int, int]) -> list[int]:
    """This process, and all that come from it."""
    known = {os.getpid()}
    for _ in range(20):  # generations
        known |= {child for child, parent in parents.items() if parent in known}
    return sorted(known)


def _maps_vllm(process: int) -> bool:
    try:
        return COMPILED in (PROC / str(process) / "maps").read_text()
    except OSError:
        return False  # it has ended
