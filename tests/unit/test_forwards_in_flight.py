"""Which forwards are launched before a result is known, and which of them were for nothing."""

import pytest

from dllm_plugin.engine.scheduling.forwards_in_flight import ForwardsInFlight


def decode(accepts: list[int], size: int = 32, blocks: int = 3) -> tuple[int, int]:
    """Forwards that one request needs for equal blocks, launched two deep, and void ones."""
    flight, start, left, step, needed = ForwardsInFlight(), 0, size, 0, 0
    launched: list[int] = []
    while start < blocks * size:
        while len(launched) < 2 and (
            not flight.count("a", start) or flight.expects_another("a", start)
        ):
            flight.launch({"a": start})
            launched.append(start)
        launched.pop(0)
        if flight.land()["a"] != start:
            flight.num_void += 1
            continue
        needed, left, step = needed + 1, left - accepts[step], step + 1
        if left > 0:
            flight.note("a", left)
        else:
            start, left, step = start + size, size, 0
            flight.begin_block("a", size)
    return needed, flight.num_void


@pytest.mark.parametrize(
    ("accepts", "void"),
    [
        ([3] * 11, 0),  # a schedule: the end of a block is foreseen
        ([1] * 32, 0),
        ([32], 1),  # blocks of one step: the first one tells
        (
            [16, 16],
            2,
        ),  # a first step decides more than the last one of the block before
        ([12, 8, 6, 3, 2, 1], 0),
        ([2, 3, 5, 9, 13], 3),  # steps that decide more and more
    ],
)
def test_few_forwards_are_for_nothing(accepts: list[int], void: int) -> None:
    needed, found = decode(accepts)
    assert needed == 3 * len(accepts)
    assert found <= void


def test_forwards_of_other_blocks_do_not_count() -> None:
    flight = ForwardsInFlight()
    flight.launch({"a": 8, "b": 3})
    flight.launch({"a": 8})
    assert [flight.count("a", at) for at in (8, 16)] == [2, 0] and flight.count(
        "b", 3
    ) == 1
    assert flight.land() == {"a": 8, "b": 3}
    assert [flight.count(name, 8) for name in "abc"] == [1, 0, 0]


def test_the_last_step_of_a_block() -> None:
    """Known steps and those in flight; a block that takes more steps than that has no last one."""
    flight, last = ForwardsInFlight(), list[int]()
    for step in range(1, 7):
        flight.launch({"a": 8})
        if flight.is_last("a", 8, 4):
            last.append(step)
        flight.land()
        flight.note("a", 30 - step)
    assert last == [4]
    flight.begin_block("a", 32)
    flight.launch({"a": 40})
    assert flight.is_last("a", 40, 1) and not flight.is_last("a", 40, 2)
    flight.note("a", 30)
    assert flight.is_last("a", 40, 2)
    flight.forget("a")
    assert flight.is_last("a", 40, 1), "a block that starts again has no known step"
