"""Which worker of a test run is given what, and in which order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import spread

TESTS = Path(__file__).parents[1]


def test_listed_files_are_there_and_listed_once() -> None:
    assert all((TESTS / file).is_file() for file in spread.LONGEST)
    assert all((TESTS.parent / file).is_file() for file in spread.ALONE)
    assert len(set(spread.LONGEST)) == len(spread.LONGEST)


def test_what_takes_longest_comes_first_and_the_rest_stays() -> None:
    names = ["unit/a.py", spread.LONGEST[1], "unit/b.py", spread.LONGEST[0], spread.LONGEST[1]]
    names.append("kernels/test_partials.py")
    items: list[Any] = [SimpleNamespace(path=TESTS / name, at=i) for i, name in enumerate(names)]
    spread.sort(items)
    assert [item.at for item in items] == [5, 3, 1, 4, 0, 2]


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/kernels/test_confidence.py::test_a[1]", "tests/kernels/"),
        ("tests/kernels/test_partials.py::test_b", "tests/kernels/"),
        ("tests/unit/test_bench.py::test_c[x/y::z]", "tests/unit/test_bench.py"),
        *[
            (f"{file}::test_d[{i}]", f"{file}::test_d[{i}]")
            for file in spread.ALONE
            for i in (1, 2)
        ],
    ],
)
def test_what_goes_to_one_worker_as_a_whole(nodeid: str, scope: str) -> None:
    assert spread.scope_of(nodeid) == scope


def item_of(callspec: dict[str, int] | None, *given: str | tuple[str, ...]) -> Any:
    """A test with numbered parameters, of which `given` are lists of names of `parametrize`."""
    markers = [SimpleNamespace(args=(names,)) for names in given]
    item = SimpleNamespace(iter_markers=lambda name: markers)
    if callspec is not None:
        item.callspec = SimpleNamespace(indices=callspec)
    return item


def test_a_matrix_is_halved_as_on_a_chessboard() -> None:
    halves = [
        (family, way)
        for family in range(3)
        for way in range(2)
        if not spread.is_other_half(item_of({"family": family, "way": way}, "family", "way"))
    ]
    assert halves == [(0, 0), (1, 1), (2, 0)]
    decoders = [i for i in range(6) if not spread.is_other_half(item_of({"decoder": i}))]
    assert decoders == [0, 2, 4]


@pytest.mark.parametrize(
    "item",
    [
        item_of(None),
        item_of({"family": 1}),
        item_of({"name": 1, "options": 1}, "name, options"),
        item_of({"name": 1, "options": 1}, ("name", "options")),
    ],
)
def test_what_is_no_matrix_stays_whole(item: Any) -> None:
    assert not spread.is_other_half(item)
