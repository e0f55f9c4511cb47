"""Note of each output token at which forward it was taken, and how certain it was.

Shape letters: C canvas positions, P output positions.
"""

import numpy as np

NO_TOKEN = -1


class Trace:
    """Hold the trace of one request.

    rows_P2  float32: forward, 0 of tokens that stood there before the first one; confidence, NaN
             of those that no policy took
    known_P  bool, the position has a token
    """

    def __init__(self, num_positions: int) -> None:
        self.rows_P2 = np.zeros((num_positions, 2), dtype=np.float32)
        self.known_P = np.zeros(num_positions, dtype=np.bool_)

    def note(
        self,
        base: int,
        forward: int,
        ids_C: np.ndarray,
        confidence_C: np.ndarray,
        taken_C: np.ndarray,
    ) -> None:
        """Note what a forward decided of a canvas that starts at output position `base`."""
        known_C = self.known_P[base : base + len(ids_C)]
        rows_C2 = self.rows_P2[base : base + len(ids_C)]
        decided_C = ids_C[: len(known_C)] != NO_TOKEN
        taken_C = taken_C[: len(known_C)] & decided_C
        # What is there without having been taken was known before this forward.
        found_C = decided_C & ~known_C & ~taken_C
        rows_C2[taken_C, 0], rows_C2[found_C, 0] = forward, forward - 1
        new_C = taken_C | found_C
        certain_C = confidence_C[: len(known_C)]
        rows_C2[new_C, 1] = np.where(certain_C > 0, certain_C, np.nan)[new_C]
        known_C[:] = decided_C

    def rows(self, first: int, num_tokens: int) -> np.ndarray:
        """Return the rows of the output tokens from position `first` on."""
        return self.rows_P2[first : first + num_tokens].copy()
