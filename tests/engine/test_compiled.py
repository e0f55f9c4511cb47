"""The compiled step: one graph, the same text, and nothing compiled once requests run."""

import torch
from mixed import BLOCK, decode, fresh_compiler

from dllm_plugin.kernels import reference


def test_compiled_steps_take_the_same_decisions() -> None:
    """Traced and not translated, which takes minutes here; tests/gpu runs real code."""
    with fresh_compiler():
        plain, compiled = decode(BLOCK, False, None), decode(BLOCK, False, "eager")
    for one, other in zip(plain, compiled, strict=True):
        assert one.output == other.output and one.passes == other.passes


def test_both_forms_of_ranking_agree() -> None:
    """What compiled code counts is what other code sorts."""
    generator = torch.Generator().manual_seed(3)
    for positions, slots in ((1, 1), (7, 2), (33, 5)):
        score = torch.randint(0, 5, (40, positions), generator=generator).float()
        score[score == 0] = -float("inf")
        candidates = torch.rand(40, positions, generator=generator) < 0.6
        block = torch.randint(0, slots + 1, (40, positions), generator=generator)
        counted = reference._rank_by_counting(score, candidates, None)
        assert torch.equal(counted, reference.rank(score, candidates))
        of_none = block.where(candidates, slots)
        counted = reference._rank_by_counting(score, candidates, of_none)
        sorted_ranks = reference.rank_in_block(score, candidates, block, slots)
        assert torch.equal(counted[candidates], sorted_ranks[candidates])
        best = reference.best_per_block(score, candidates & (block < slots), block, slots)
        first = candidates & (block < slots) & (counted == 0)
        assert torch.equal(best, first)
