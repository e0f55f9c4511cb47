"""Cut what a forward computes into query segments, on the host. Numpy only."""

import numpy as np


def canvas_segments(
    num_computed_R: np.ndarray, length_R: np.ndarray, max_blocks: int
) -> np.ndarray:
    """Return the stops of a block-causal canvas's query segments: int ``[R, max_blocks + 1]``.

    Segment i is ``[stop[i - 1], stop[i])`` relative to the canvas start and sees every key up to
    its own stop. What lies behind `max_blocks` blocks can hold no open block and is the last
    segment; segments may be empty.
    """
    stops = np.arange(1, max_blocks + 2) * length_R[:, None]
    stops[:, -1] = num_computed_R
    return np.minimum(stops, num_computed_R[:, None])


def prefill_segments(origin_R: np.ndarray, end_R: np.ndarray, length_R: np.ndarray) -> np.ndarray:
    """Return the stops of the query segments of a prefill ``[0, end)``: int ``[R, K + 1]``.

    What lies before the origin of the block grid, which is the prompt or nothing, is one
    bidirectional block; the rest follows block by block, so that the KV of a resumed request is
    what it was before preemption.
    """
    most = int((np.maximum(end_R - origin_R, 0) // length_R).max(initial=0)) + 1
    stops = origin_R[:, None] + np.arange(most + 1) * length_R[:, None]
    return np.minimum(stops, end_R[:, None])
