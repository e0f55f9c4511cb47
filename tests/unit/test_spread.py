"""Which worker of a test run is given what, and in which order."""

from collections import Counter
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
    names = [
        "unit/a.py",
        spread.LONGEST[1],
        "unit/b.py",
        spread.LONGEST[0],
        spread.LONGEST[1],
    ]
    names.append("kernels/test_partials.py")
    items: list[Any] = [
        SimpleNamespace(path=TESTS / name, at=i) for i, name in enumerate(names)
    ]
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
ways = pytest.mark.parametrize("way", list("abcde"))

@pytest.fixture(params=["x", "y"])
def fixed(request):
    return request.param

@ways
@pytest.mark.parametrize("number", [[1], [2], [3]])
def test_direct(way, number): ...

@ways
def test_with_a_fixture(fixed, way): ...

@pytest.mark.parametrize("way", list("abcde") + [pytest.param("f", marks=pytest.mark.slow)])
def test_one_stays(way): ...

@ways
def test_a_second_one_stays(way): ...

@pytest.mark.parametrize(("name", "size"), [(name, 1) for name in "abcdefghijklmnop"])
def test_one_long_list_is_one_axis(name, size): ...

@pytest.mark.parametrize("one", [1])
def test_the_only_one_stays(one): ...

def test_without_parameters(): ...
"""


class Chosen:
    """Notes what is left to the slow run of tests that pytest itself has collected."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.left = [item.name for item in spread.left_to_slow(session.items)]


def test_what_is_left_to_the_slow_run(tmp_path: Path) -> None:
    """Half of a long matrix, and of a short list all but one, which differs between functions."""
    file, chosen = tmp_path / "test_matrices.py", Chosen()
    file.write_text(MATRICES)
    markers = tmp_path / "pytest.ini"
    markers.write_text("[pytest]\nmarkers = slow\n")
    options = ["--collect-only", "-q", "-c", str(markers), "-p", "no:cacheprovider"]
    pytest.main([str(file), *options], plugins=[chosen])
    left = Counter(name.partition("[")[0] for name in chosen.left)
    assert left == {
        "test_direct": 7,
        "test_with_a_fixture": 9,
        "test_one_stays": 4,
        "test_a_second_one_stays": 4,
    }
    long = {name for name in chosen.left if name.startswith("test_direct")}
    assert long == {
        *("test_direct[number0-b]", "test_direct[number0-d]"),
        *("test_direct[number1-a]", "test_direct[number1-c]", "test_direct[number1-e]"),
        *("test_direct[number2-b]", "test_direct[number2-d]"),
    }
    stays = {
        next(way for way in "abcde" if f"{name}[{way}]" not in chosen.left)
        for name in ("test_one_stays", "test_a_second_one_stays")
    }
    assert len(stays) == 2
