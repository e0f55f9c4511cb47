"""Check which positions of a Fast-dLLM v2 block are decoded, and which have their KV stored."""

import handmade
import numpy as np
import pytest
import torch

from dllm_plugin.decoding.block_causal import plan_sub_blocks, sub_block_to_store

MASK = handmade.MASK
RNG = np.random.default_rng(11)


def places(mask_C: torch.Tensor) -> list[int]:
    return mask_C.nonzero().flatten().tolist()


@pytest.mark.parametrize("sub", [0, 1, 3, 4, 100])
@pytest.mark.parametrize("length", [4, 7, 12])
def test_candidates_lie_in_the_first_sub_block_with_masks(
    length: int, sub: int
) -> None:
    """Of each active block, counted from its own start; 0 means the whole block."""
    tokens = np.where(RNG.random((50, 24)) < 0.4, MASK, 1)
    slots = -(-24 // length)
    canvas = handmade.canvas(
        *(50, 24, length, True, tokens.tolist()),
        open_R=slots,
        max_active_R=9.0,
        sub_length_R=sub,
    )
    plan = plan_sub_blocks(canvas, MASK)
    for row in range(50):
        expected = []
        for low in range(0, 24, length):
            masked = [
                p for p in range(low, min(low + length, 24)) if tokens[row, p] == MASK
            ]
            first = [
                p
                for p in masked
                if not sub or (p - low) // sub == (masked[0] - low) // sub
            ]
            expected += first
        assert places(plan.candidates_RC[row]) == expected


def stored(tokens: list[int], sub: int) -> list[int]:
    canvas = handmade.canvas(
        1, len(tokens), tokens=[tokens], sub_length_R=sub, open_R=1
    )
    return places(sub_block_to_store(canvas, plan_sub_blocks(canvas, MASK))[0])


def test_kv_of_a_sub_block_alone_once_its_first_token_is_known() -> None:
    whole = list(range(8))
    assert stored([1, MASK, 1, 1, MASK, MASK, MASK, MASK], 4) == [0, 1, 2, 3]
    assert stored([1, 1, 1, 1, 1, MASK, MASK, MASK], 4) == [4, 5, 6, 7]
    assert stored([1, 1, 1, 1, MASK, 1, 1, 1], 4) == whole  # computed as a whole block
    assert stored([1] * 8, 4) == whole  # the block is stored
    assert stored([1, 1, 1, 1, 1, 1, 1, MASK], 3) == [6, 7]  # sub-blocks need not fit
    assert stored([1, 1, MASK, 1], 9) == [0, 1, 2, 3]


def test_requests_without_sub_blocks_are_left_alone() -> None:
    canvas = handmade.canvas(2, 8, tokens=MASK, sub_length_R=[0, 4], open_R=1)
    plan = plan_sub_blocks(canvas, MASK)
    assert [len(places(row)) for row in plan.candidates_RC] == [8, 4]
