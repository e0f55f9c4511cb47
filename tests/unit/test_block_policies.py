"""Several active blocks: ranks within a block, quotas, opening and activation, by plain loops."""

import handmade
import numpy as np
import pytest
import torch

from dllm_plugin.decoding.block_causal import plan_block_diffusion
from dllm_plugin.decoding.blocks import rank_in_block
from dllm_plugin.decoding.plan import Proposal
from dllm_plugin.decoding.policies import EDITED_BLOCKS

RNG = np.random.default_rng(7)
MASK = handmade.MASK


def by_block(block_length: int, num_positions: int) -> list[range]:
    return [
        range(low, min(low + block_length, num_positions))
        for low in range(0, num_positions, block_length)
    ]


@pytest.mark.parametrize("length,num_positions", [(1, 5), (3, 7), (4, 12), (9, 9)])
def test_rank_in_block_counts_anew(length: int, num_positions: int) -> None:
    canvas = handmade.canvas(40, num_positions, length)
    score = torch.from_numpy(
        RNG.choice([0.1, 0.5, 0.7, -np.inf, np.nan], (40, num_positions))
    )
    candidates = torch.from_numpy(RNG.random((40, num_positions)) < 0.6)
    ranks = rank_in_block(score, candidates, canvas.block_RC, canvas.size_RS.shape[1])
    for row in range(40):
        for block in by_block(length, num_positions):
            masked = [p for p in block if candidates[row, p]]
            known = [p for p in masked if not score[row, p].isnan()]
            order = sorted(known, key=lambda p: (-float(score[row, p]), p))
            places = ranks[row, masked].tolist()
            assert sorted(places) == list(range(len(masked)))
            if known == masked:
                assert ranks[row, order].tolist() == list(range(len(order)))


def test_rank_in_block_beside_positions_of_no_block() -> None:
    canvas = handmade.canvas(1, 6, 3)._replace(
        block_RC=torch.tensor([[0, 0, 0, 1, 2, 2]])
    )
    candidates = torch.tensor([[True, False, True, True, False, False]])
    score = torch.tensor([[0.2, 0.9, 0.4, 0.1, 0.8, 0.8]])
    ranks = rank_in_block(score, candidates, canvas.block_RC, 2)
    assert ranks[candidates].tolist() == [1, 0, 0]


def sure_or_best(
    score: list[float], confidence: list[float], threshold: float, quota: int
) -> set[int]:
    """Of one block's candidates, by place: SDAR ``low_confidence_dynamic``, in Python."""
    sure = {
        i for i, c in enumerate(confidence) if np.float32(c) > np.float32(threshold)
    }
    best = sorted(range(len(score)), key=lambda i: (-score[i], i))[:quota]
    return sure if len(sure) >= quota else set(best)


@pytest.mark.parametrize("policy", ["threshold", "joint_threshold"])
def test_sure_or_best_of_several_blocks(policy: str) -> None:
    """The first unfinished block has its quota, full ones behind it one, the others none."""
    requests, positions, length, steps = 200, 15, 4, 3
    blocks = by_block(length, positions)
    full = RNG.random((requests, len(blocks))) < 0.5
    step = RNG.integers(0, 4, requests)
    canvas = handmade.canvas(requests, positions, length, full, step=step)
    score = torch.from_numpy(
        RNG.permuted(np.tile(np.arange(positions), (requests, 1)), axis=1)
    )
    confidence = torch.from_numpy(RNG.random((requests, positions)).astype(np.float32))
    candidates = torch.from_numpy(RNG.random((requests, positions)) < 0.5)
    active = torch.stack(
        [candidates[:, list(block)].any(dim=1) for block in blocks], dim=1
    )
    plan = handmade.plan(canvas, candidates)._replace(active_RS=active)
    settings = handmade.settings(canvas, steps, threshold=0.7, num_to_transfer=2)
    proposal = Proposal(torch.zeros_like(canvas.tokens_RC), confidence, score.float())
    take = EDITED_BLOCKS[policy].rule(plan, canvas, proposal, settings)
    for row in range(requests):
        expected, is_first = set(), True
        for block, flag in zip(blocks, full[row], strict=True):
            masked = [p for p in block if candidates[row, p]]
            if not masked:
                continue
            quota = int(flag)
            if is_first and policy == "threshold":
                last = step[row] >= steps - 1
                quota = 100 if last else length // steps + (step[row] < length % steps)
            elif is_first:
                quota = 2
            is_first = False
            chosen = sure_or_best(
                score[row, masked].tolist(),
                confidence[row, masked].tolist(),
                0.7,
                quota,
            )
            expected |= {masked[i] for i in chosen}
        assert set(take[row].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_blocks_are_active_than_asked_for(most: int) -> None:
    """A finished block that is being stored does not count."""
    tokens = [[1, 1, 1, 1] + [1, MASK, 1, 1] + [MASK] * 8]
    canvas = handmade.canvas(
        *(1, 16, 4, False, tokens),
        open_R=[2],
        max_active_R=[float(most)],
        block_add_threshold_R=[0.5],
        decoded_token_threshold_R=[0.9],
    )
    plan = plan_block_diffusion(canvas, MASK)
    assert plan.num_stored_R.tolist() == [1] and plan.num_committed_R.tolist() == [4]
    assert plan.active_RS.tolist() == [[False, True, most > 1, False]]
    # The second block stands behind a finished one; the third behind one decided to 3/4.
    assert plan.full_RS[0, :3].tolist() == [True, True, False]


def test_one_active_block_ignores_the_thresholds_of_several() -> None:
    tokens = [[1, 1, 1, MASK] + [MASK] * 4]
    canvas = handmade.canvas(1, 8, 4, False, tokens, open_R=[1])
    plan = plan_block_diffusion(canvas, MASK)
    assert plan.open_R.tolist() == [1] and plan.full_RS.tolist() == [[True, False]]
    several = canvas._replace(max_active_R=torch.tensor([2.0]))
    assert plan_block_diffusion(several, MASK).open_R.tolist() == [2]
