"""What the host knows of masks: an upper bound at all times, exact once a result is known."""

import numpy as np
import pytest
import torch

from dllm_plugin.sampling.mask_counts import MaskCounts

SLOTS, STARTS, SIZES = np.array([3, 1]), np.array([10, 40]), np.array([8, 6])


def counts_after(steps_in_flight: int, *left: list[int]) -> MaskCounts:
    counts = MaskCounts(5, steps_in_flight)
    for of_step in left:
        counts.record(SLOTS, STARTS, torch.tensor(of_step, dtype=torch.int32))
    return counts


def test_blocks_of_which_nothing_is_known_may_be_only_masks() -> None:
    assert counts_after(0).most(SLOTS, STARTS, SIZES).tolist() == [8, 6]


@pytest.mark.parametrize(
    ("steps_in_flight", "known"), [(0, [2, 3]), (1, [5, 4]), (2, [8, 6])]
)
def test_results_in_flight_are_not_waited_for(
    steps_in_flight: int, known: list[int]
) -> None:
    """Masks only become fewer, so what was left before is enough."""
    counts = counts_after(steps_in_flight, [5, 4], [2, 3])
    assert counts.most(SLOTS, STARTS, SIZES).tolist() == known


def test_grammars_take_tokens_back() -> None:
    """A result that is not known yet may have made masks more; a known one tells."""
    for steps_in_flight, known in ((0, [2, 3]), (1, [8, 4])):
        counts = counts_after(steps_in_flight, [5, 4], [2, 3])
        counts.grows_np[3] = True
        assert counts.most(SLOTS, STARTS, SIZES).tolist() == known


def test_another_block_starts_with_all_its_positions() -> None:
    counts = counts_after(0, [5, 0])
    assert counts.most(SLOTS, STARTS, SIZES).tolist() == [5, 6], (
        "0 are left: the block is done"
    )
    assert counts.most(SLOTS, STARTS + 8, SIZES).tolist() == [8, 6]


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_another_request_in_the_slot(steps_in_flight: int) -> None:
    """Even where it starts at the same place, and with results of the one before in flight."""
    counts = counts_after(steps_in_flight, [5, 4], [2, 3])
    counts.forget(3)
    counts.record(SLOTS[1:], STARTS[1:], torch.tensor([3], dtype=torch.int32))
    assert counts.most(SLOTS, STARTS, SIZES).tolist() == [8, 3]
