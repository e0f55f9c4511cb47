"""Count, spread and rank canvas positions, by block. Torch only.

Shape letters as in :mod:`dllm_plugin.decoding.plan`. Compiled code uses
other forms of the same functions, such as `_rank_by_counting`.
"""

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


def per_block(mask_RC: Tensor, block_RC: Tensor, num_slots: int) -> Tensor:
    """Count True positions of each block slot: ``[R, C] -> [R, S]`` int32."""
    if torch.compiler.is_compiling():
        slot_S1 = torch.arange(num_slots, device=mask_RC.device)[:, None]
        return (mask_RC[:, None] & (block_RC[:, None] == slot_S1)).sum(
            dim=2, dtype=torch.int32
        )
    counts = torch.zeros(
        mask_RC.shape[0], num_slots + 1, dtype=torch.int32, device=mask_RC.device
    )
    counts.scatter_add_(1, block_RC, mask_RC.to(torch.int32))
    return counts[:, :num_slots]


def at_positions(value_RS: Tensor, block_RC: Tensor) -> Tensor:
    """Spread a bool per block slot over its positions: ``[R, S] -> [R, C]``; False in no block."""
    # Not by padding: compiled by torch 2.11 for GPUs, a padded bool of one element becomes True.
    num_slots = value_RS.shape[1]
    return value_RS.gather(1, block_RC.clamp_max(num_slots - 1)) & (
        block_RC < num_slots
    )


def leading(flag_RX: Tensor) -> Tensor:
    """Return the length of the leading run of True along the last axis, int64 ``[R]``."""
    position_X = torch.arange(flag_RX.shape[1], device=flag_RX.device)
    return torch.where(flag_RX, flag_RX.shape[1], position_X).amin(dim=1)


def rank(score_RC: Tensor, candidates_RC: Tensor) -> Tensor:
    """Rank each candidate by falling score, int64 ``[R, C]``; ties go to the lower position.

    Positions that are no candidates rank after all candidates.
    """
    if torch.compiler.is_compiling():
        return _rank_by_counting(score_RC, candidates_RC, None)
    least, most = NEGATIVE_INFINITY, -NEGATIVE_INFINITY
    score_RC = score_RC.nan_to_num(least, most, least)
    # Sorts put NaN last: after a candidate whose score is -inf.
    key_RC = (-score_RC).masked_fill(~candidates_RC, float("nan"))
    return key_RC.argsort(dim=1, stable=True).argsort(dim=1)


def rank_in_block(
    score_RC: Tensor, candidates_RC: Tensor, block_RC: Tensor, num_slots: int
) -> Tensor:
    """Rank as :func:`rank`, counted anew in each block slot; int64 ``[R, C]``."""
    block_RC = block_RC.where(candidates_RC, num_slots)
    if torch.compiler.is_compiling():
        return _rank_by_counting(score_RC, candidates_RC, block_RC)
    ranks_RC = rank(score_RC, candidates_RC)
    # By block, and within a block by rank: blocks are few, so both fit one key.
    key_RC = block_RC * score_RC.shape[1] + ranks_RC
    place_RC = key_RC.argsort(dim=1).argsort(dim=1)
    counts_RS = per_block(candidates_RC, block_RC, num_slots).to(torch.int64)
    first_RS = torch.nn.functional.pad(counts_RS.cumsum(dim=1), (1, 0))
    return place_RC - first_RS.gather(1, block_RC)


def _rank_by_counting(
    score_RC: Tensor, candidates_RC: Tensor, group_RC: Tensor | None
) -> Tensor:
    """Count the positions (of its group) that come before each position. No score may be NaN.

    The form of :func:`rank` that compiles to one kernel; uncompiled it needs ``R * C * C`` bytes.
    """
    score_RC = score_RC.masked_fill(~candidates_RC, NEGATIVE_INFINITY)
    position_C = torch.arange(score_RC.shape[1], device=score_RC.device)
    mine, other = score_RC[:, :, None], score_RC[:, None]
    ahead_RCC = (other > mine) | ((other == mine) & (position_C < position_C[:, None]))
    candidate = candidates_RC[:, :, None]
    other_candidate = candidates_RC[:, None]
    ahead_RCC = (other_candidate & ~candidate) | (
        (other_candidate == candidate) & ahead_RCC
    )
    if group_RC is not None:
        ahead_RCC = ahead_RCC & (group_RC[:, :, None] == group_RC[:, None])
    return ahead_RCC.sum(dim=2)
