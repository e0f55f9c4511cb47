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


MATRICES = """
import pytest

pytestmark = pytest.mark.filterwarnings("default")
ways = pytest.mark.parametrize("way", ["a", "b", "c"])

@pytest.fixture(params=["x", "y"])
def fixed(request):
    return request.param

@ways
@pytest.mark.parametrize("number", [[1], [2]])
def test_direct(way, number): ...

@ways
def test_with_a_fixture(fixed, way): ...

@ways
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_slow_ones_do_not_count(way, number): ...

@ways
@pytest.mark.parametrize("one", [1])
def test_one_value_is_no_axis(way, one): ...

@pytest.mark.parametrize(("name", "size"), [("a", 1), ("b", 2)])
def test_one_list_is_one_axis(name, size): ...

def test_without_parameters(): ...
"""


class Chosen:
    """Notes what is left to the slow run of tests that pytest itself has collected."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.left = [item.name for item in spread.left_to_slow(session.items)]


def test_half_of_a_matrix_is_left_to_the_slow_run(tmp_path: Path) -> None:
    file, chosen = tmp_path / "test_matrices.py", Chosen()
    file.write_text(MATRICES)
    markers = tmp_path / "pytest.ini"
    markers.write_text("[pytest]\nmarkers = slow\n")
    options = ["--collect-only", "-q", "-c", str(markers), "-p", "no:cacheprovider"]
    pytest.main([str(file), *options], plugins=[chosen])
    assert sorted(chosen.left) == [
        "test_direct[number0-b]",
        "test_direct[number1-a]",
        "test_direct[number1-c]",
        "test_with_a_fixture[x-b]",
        "test_with_a_fixture[y-a]",
        "test_with_a_fixture[y-c]",
    ]
