"""Choose the widths of floating canvases that full CUDA graphs are captured for. Numpy only.

A graph for every width and number of requests would take too much memory, and most of them would
never be replayed.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations

import numpy as np

from dllm_plugin.decoding.acceptance import Acceptance
from dllm_plugin.decoding.step_costs import Costs
from dllm_plugin.decoding.widths import MARGIN

MOST_WIDTHS = 6  # for each number of requests
WORTH = 0.8  # of the best rate, at some acceptance and context
CONTEXTS = (0, 1, 4)  # what reading all contexts twice costs, in units of a small step


@cache
def widths_worth(
    requests: int, widths: tuple[int, ...], shift: bool
) -> tuple[int, ...]:
    """Return the widths, ascending, that a number of requests may want.

    Of those that come near the best one at some acceptance and some context, as few as lose nothing
    that a controller would change its width for, else the six that lose least where they lose
    most.
    """
    curves_PW, costs = _curves(widths, shift), Costs(per_key=1.0)
    shares = []
    for context in CONTEXTS:
        times_W = [costs.step(requests, width, context) for width in widths]
        rates_PW = curves_PW / np.array(times_W)
        shares.append(rates_PW / rates_PW.max(axis=1, keepdims=True))
    share_LW = np.concatenate(shares)
    worth = np.flatnonzero(share_LW.max(axis=0) >= WORTH).tolist()
    chosen = np.array([], dtype=np.int64)
    for count in range(1, min(MOST_WIDTHS, len(worth)) + 1):
        some = np.array(list(combinations(worth, count)))
        least = share_LW[:, some].max(axis=2).min(axis=0)
        chosen = some[least.argmax()]
        if least.max() * MARGIN >= 1:
            break
    return tuple(widths[i] for i in chosen.tolist())


@cache
def _curves(widths: tuple[int, ...], shift: bool) -> np.ndarray:
    return Acceptance(widths, shift).curves


def allowed(
    graphs: Mapping[int, Sequence[int]], widths: Sequence[int], most: int
) -> dict[int, tuple[bool, ...]]:
    """Return which widths a controller may choose, by ascending numbers of requests.

    Those with a graph, and those that compute more than `most` positions: such steps take the
    device longer than the host, whatever they run in. For more requests than all of these every
    width may be chosen.

    Args:
        graphs: ascending numbers of requests that are captured, of each width.
    """
    counts = sorted({count for counts in graphs.values() for count in counts})
    return {
        count: tuple(w * count > most or count in graphs.get(w, ()) for w in widths)
        for count in counts
    }
