"""Spread test files over workers: what takes longest first, so that the workers end together.

Of engine tests with parameters, say which ones `make test` leaves to `make test-slow`.

The tests of a file stay together, for they share engines; those of kernels, in all of their files,
share the process that interprets. Tests that share nothing and take long go one by one.
"""

from collections import defaultdict
from typing import Any
from zlib import crc32

import pytest
from xdist.scheduler import LoadScopeScheduling

SHORT = 14  # tests of a function, of which `make test` runs one
TOGETHER = "tests/kernels/"
ALONE = ("tests/unit/test_structured_random.py",)
# From about 10 s on, by what they spend on processors; a file that is not here comes behind these.
LONGEST = (
    "unit/test_structured_random.py",  # first: it wants a world of ranks that no engine has built
    "engine/test_soak.py",
    "engine/test_full_requests.py",
    "engine/test_verify_command.py",
    "engine/test_bench_modes.py",
    "engine/test_structured_outputs.py",
    "engine/test_block_goldens.py",
    "engine/test_full_goldens.py",
    "engine/test_grid_goldens.py",
    "engine/test_memory.py",
    "engine/test_templates.py",
    "engine/test_faults.py",  # not beside the soak: both keep a server busy
    "engine/test_omni_processes.py",
    "engine/test_omni_pipelines.py",
    "engine/test_bundled.py",
    "engine/test_batching.py",
    "engine/test_parallel.py",
    "engine/test_full_memory.py",
    "engine/test_omni_hidden_states.py",
    "engine/test_grid_prefix.py",
    "engine/test_distinct.py",
    "engine/test_progress.py",
    "engine/test_adapters.py",
    "engine/test_server.py",
    "engine/test_sampling.py",
    "engine/test_compiled.py",
    "engine/test_omni_servers.py",
    "engine/test_full_server.py",
    "engine/test_traces.py",
    "engine/test_stops_and_bans.py",
    "engine/test_weight_updates.py",
    "engine/test_golden_traces.py",
    "engine/test_likelihood_api.py",
    "engine/test_infill_api.py",
    "engine/test_context_end.py",
    "engine/test_full_plain.py",
    "engine/test_api.py",
)


def axes_of(item: pytest.Item) -> dict[str, Any]:
    """Values of a test on the axes of its parameters: names of one list are one axis."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return {}
    given = [marker.args[0] for marker in item.iter_markers("parametrize")]
    lists = [
        n.replace(" ", "").split(",") if isinstance(n, str) else list(n) for n in given
    ]
    behind = {name for names in lists for name in names[1:]}
    return {
        name: value for name, value in callspec.params.items() if name not in behind
    }


def left_to_slow(items: list[pytest.Item]) -> list[pytest.Item]:
    """All but one test of each short list of parameters, and every second one of a long matrix.

    Which one stays differs from function to function, so that together they meet most of what the
    lists name: families, strategies, schedulers. Long lists are of small cases.
    """
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if axes_of(item) and item.get_closest_marker("slow") is None:
            matrices[item.nodeid.partition("[")[0]].append(item)
    left = []
    for name, tests in matrices.items():
        if len(tests) <= SHORT:
            stays = crc32(name.encode()) % len(tests)
            left += [test for i, test in enumerate(tests) if i != stays]
        else:
            left += _every_second(tests)
    return left


def _every_second(tests: list[pytest.Item]) -> list[pytest.Item]:
    """Every second test of a matrix, as on a chessboard, so that the others meet every value.

    pytest numbers direct parameters by their combination, so values are numbered here.
    """
    places, num_axes = [0] * len(tests), 0
    for column in zip(*(axes_of(test).values() for test in tests), strict=True):
        values: list[Any] = []
        for i, value in enumerate(column):
            if value not in values:
                values.append(value)
            places[i] += values.index(value)
        num_axes += len(values) > 1
    if num_axes <= 1:
        return []
    return [test for test, place in zip(tests, places, strict=True) if place % 2]


def rank(file: str) -> int:
    """Where a file comes, by its path below `tests`; kernels are one large scope."""
    if file.startswith("kernels/"):
        return -1
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def scope_of(nodeid: str) -> str:
    """What is given to one worker as a whole."""
    file = nodeid.split("::", 1)[0]
    if file in ALONE:
        return nodeid
    return TOGETHER if file.startswith(TOGETHER) else file


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    """Hands scopes out in the order in which tests were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def sort(items: list[pytest.Item]) -> None:
    """Put what takes longest first; the order within a file stays."""
    items.sort(key=lambda item: rank("/".join(item.path.parts[-2:])))
