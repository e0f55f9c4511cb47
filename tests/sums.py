"""Print what a test run spent besides its tests: starts of engines and servers, imports of vLLM.

Printed as sums at the end. A process has imported vLLM when vLLM's compiled code is mapped into it;
where two have it at the same random address, one was forked from the other and imported nothing.
"""

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

PROC = Path("/proc")
EVERY = 2.0  # seconds; to import vLLM takes several, and a look some milliseconds
COMPILED = "/vllm/_C"


def starts(module: str) -> list[float]:
    """Return the seconds of each start in this process, of `engines` or of `processes`."""
    found = sys.modules.get(module)
    return list(found.STARTS) if found else []


def register(config: pytest.Config) -> None:
    """Register the plugin: a worker of xdist reports to the process that started it."""
    output = getattr(config, "workeroutput", None)
    config.pluginmanager.register(Worker(output) if output is not None else Sums())


class Worker:
    """Hands its starts to the controller."""

    def __init__(self, output: dict[str, Any]) -> None:
        self.output = output

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.output["left_out"] = self.output.get("left_out", 0) + len(items)

    def pytest_sessionfinish(self) -> None:
        self.output["engine_starts"] = starts("engines")
        self.output["server_starts"] = starts("processes")


class Sums:
    """Collects what workers report, watches processes, and prints."""

    def __init__(self) -> None:
        self.engines: list[float] = []  # seconds of each start
        self.servers: list[float] = []
        self.seconds = 0.0
        self.left_out = 0  # tests
        self.mapped: dict[int, str] = {}  # address of vLLM's code by process
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)

    def pytest_sessionstart(self) -> None:
        if PROC.is_dir():
            self.watcher.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out += len(items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        self.engines += output.get("engine_starts", [])
        self.servers += output.get("server_starts", [])
        self.left_out = output.get("left_out", 0)  # each worker leaves out the same

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        self.ended.set()
        engines = self.engines + starts("engines")
        servers = self.servers + starts("processes")
        imports, forks = self.processes()
        terminalreporter.write_line(
            f"tests took {self.seconds:.0f} s in all; of it {len(engines)} engine starts in their "
            f"own processes {sum(engines):.0f} s, {len(servers)} server starts "
            f"{sum(servers):.0f} s; {imports} processes "
            f"imported vLLM, and {forks} were forked from one that had"
        )
        if self.left_out:
            terminalreporter.write_line(
                f"{self.left_out} tests left out, as asked for with -m or -k; "
                "`make test-all` runs every test"
            )

    def processes(self) -> tuple[int, int]:
        """Processes that imported vLLM, and those that came to it by a fork."""
        imports = len(set(self.mapped.values()))
        return imports, len(self.mapped) - imports

    def look(self) -> None:
        """Note the processes that there are now."""
        for process in _descendants(_parents()):
            address = "" if process in self.mapped else _address(process)
            if address:
                self.mapped[process] = address

    def _watch(self) -> None:
        while not self.ended.wait(EVERY):
            self.look()


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


def _address(process: int) -> str:
    """Where vLLM's compiled code lies in a process, if it has it."""
    try:
        lines = (PROC / str(process) / "maps").read_text().splitlines()
    except OSError:
        return ""  # it has ended
    return next((line.partition("-")[0] for line in lines if COMPILED in line), "")
