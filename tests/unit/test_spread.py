"""Which worker of a test run is given what, and in which order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import spread

TESTS = Path(__file__).parents[1]


def test_listed_files_are_there_and_listed_once() -> None:
    together = [file for files in spread.TOGETHER.values() for file in files]
    for files in (spread.LONGEST, spread.ALONE, together):
        assert all((TESTS / file).is_file() for file in files)
        assert len(set(files)) == len(files)


@pytest.mark.parametrize("server", ["tiny server", "bundled server"])
def test_a_shared_server_is_started_by_one_worker(server: str) -> None:
    fixture, files = server.replace(" ", "_") + ": Server", set()
    for file in (TESTS / "engine").glob("test_*.py"):
        if fixture in file.read_text():
            files.add(f"engine/{file.name}")
    assert files and files <= set(spread.TOGETHER[server])


def test_what_takes_longest_comes_first_and_the_rest_stays() -> None:
    """Kernels, units and engines in this order, for engines leave a world of ranks behind."""
    first, second = [f for f in spread.LONGEST if f.startswith("engine/")][:2]
    names = ["engine/a.py", second, "engine/b.py", first, second]
    names += ["kernels/test_partials.py", "unit/a.py"]
    items: list[Any] = [
        SimpleNamespace(nodeid=f"tests/{name}::test", at=i)
        for i, name in enumerate(names)
    ]
    spread.sort(items)
    assert [item.at for item in items] == [5, 6, 3, 1, 4, 0, 2]


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/kernels/test_confidence.py::test_a[1]", "kernels"),
        ("tests/kernels/test_partials.py::test_b", "kernels"),
        ("tests/unit/test_bench.py::test_c[x/y::z]", "unit/test_bench.py"),
        *[
            (f"tests/{file}::test_d[{i}]", f"tests/{file}::test_d[{i}]")
            for file in spread.ALONE
            for i in (1, 2)
        ],
    ],
)
def test_what_goes_to_one_worker_as_a_whole(nodeid: str, scope: str) -> None:
    assert spread.scope_of(nodeid) == scope


def test_a_file_is_slow_as_a_whole() -> None:
    """`make test` leaves out files: no marker of a single test or parameter hides in one."""
    mark, hidden = "mark." + "slow", []
    for file in sorted(TESTS.glob("*/test_*.py")):
        for line in file.read_text().splitlines():
            whole = line.startswith(("pytestmark = ", f"    pytest.{mark},"))
            if mark in line and not whole:
                hidden.append((file.name, line))
    assert [name for name, _ in hidden] == ["test_sums.py"], "it runs a test of its own"
