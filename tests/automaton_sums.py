"""What sums of token automata may differ by: exact sums in float64, and bounds in float32.

An addition, product or exponential in float32 is off by a few units of 2**-24 of its result. All
summands are positive, so a sum is off by no more than the number of operations that its largest
chain of partial sums goes through. A kernel adds n summands in rounds of a tile, and then the tile
pairwise: at most n / tile rounds, each with an addition and, where the largest summand changes, an
exponential and a product. Exponents are differences x - max(x), rounded in proportion to their
size, which on average is at most ln(n), by their weight in the sum.
"""

import math

import torch
from torch import Tensor

from dllm_plugin.kernels.automaton import reference
from dllm_plugin.kernels.automaton.reference import NEVER, Canvases, Rows, Tables

UNIT = 2.0**-24
PER_ROUND = (
    6  # an addition, a product, and an exponential of two units in the last place
)


def _operations(summands: Tensor | float, tile: int) -> Tensor:
    """Bound the error of the logarithm of a sum, in units."""
    count = torch.as_tensor(summands, dtype=torch.float64).clamp_min(1)
    return PER_ROUND * ((count / tile).ceil() + math.log2(tile)) + 3 * count.log()


def exact_scores(tables: Tables, rows: Rows, tile: int) -> tuple[Tensor, Tensor]:
    """Score classes in float64; return ``[T, K]`` and how far float32 may be from it."""
    # What is read is float32 in every element, biased and divided: only sums differ.
    logits_TV, class_TV = (
        reference._read(rows).double(),
        tables.class_AV[rows.which_T].long(),
    )
    shape = (len(logits_TV), tables.bound_AK.shape[1] - 1)
    top_TK = logits_TV.new_full(shape, NEVER).scatter_reduce_(
        1, class_TV, logits_TV, "amax"
    )
    share_TV = (logits_TV - top_TK.gather(1, class_TV)).exp()
    mass_TK = (
        logits_TV.new_zeros(shape).scatter_add_(1, class_TV, share_TV).log() + top_TK
    )
    own_TK = torch.where(rows.temperature_T[:, None] > 0, mass_TK, top_TK)
    total_T1 = mass_TK.logsumexp(dim=1, keepdim=True)
    size_TK = tables.bound_AK.diff(dim=1)[rows.which_T]
    parts_TK = _operations(size_TK, tile).to(own_TK.device)
    # The total adds classes one by one at worst, and has the error of its worst class.
    units_TK = (
        parts_TK + parts_TK.amax(dim=1, keepdim=True) + _operations(shape[1], 1).item()
    )
    score_TK = (own_TK - total_T1).clamp_min(reference.LOW)
    units_TK = units_TK + 3 * (score_TK.abs() + total_T1.abs())
    return score_TK, units_TK * UNIT


def exact_values(
    tables: Tables, canvases: Canvases, score_GCK: Tensor, tile: int
) -> tuple[Tensor, Tensor]:
    """Value states in float64; return ``[G, C + 1, Q]`` and how far float32 may be from it."""
    value_GCQ = reference.forward(tables, canvases, score_GCK.double())
    edges = int(tables.first_AQ.diff(dim=1).max())
    length = score_GCK.shape[1]
    # Each position adds a sum over edges and rounds it; values on the way are no larger than the
    # last, but for the logarithm of how many texts were summed.
    largest_GCQ = value_GCQ.abs().nan_to_num(0, 0, 0) + length * math.log(edges + 1)
    return value_GCQ, length * (
        _operations(edges, tile).item() + 2 * largest_GCQ
    ) * UNIT


def assert_within(found: Tensor, exact: Tensor, allowed: Tensor) -> None:
    """Hold float32 results to exact ones; infinite ones are equal."""
    infinite = exact.isinf()
    assert torch.equal(found[infinite].double(), exact[infinite])
    beyond = ((found.double() - exact).abs() - allowed)[~infinite]
    assert not (beyond > 0).any(), (
        f"{int((beyond > 0).sum())} beyond, by up to {beyond.max():.1e}"
    )
    assert not beyond.isnan().any()
