"""Record at which forward each output token was taken, and with which confidence.

Shape letters: C canvas positions, P output positions.
"""

import numpy as np

from dllm_plugin.config.carriers import NO_TOKEN, CanvasRow


class Trace:
    """The trace of one request.

    rows_P2  float32: forward, 0 for tokens that were there before the first one;
             confidence, NaN if no policy took the token
    known_P  bool, the position has a token
    """

    def __init__(self, num_positions: int) -> None:
        self.rows_P2 = np.zeros((num_positions, 2), dtype=np.float32)
        self.known_P = np.zeros(num_positions, dtype=np.bool_)
        self._sent = 0

    def give(self, num_tokens: int) -> None:
        """Record leading tokens that a template gives."""
        self.rows_P2[:num_tokens, 1] = np.nan

    def record(self, base: int, forward: int, canvas: CanvasRow) -> None:
        """Record a forward's canvas, which starts at output position `base`."""
        known_C = self.known_P[base : base + len(canvas.ids_C)]
        length = len(known_C)
        rows_C2 = self.rows_P2[base : base + length]
        decided_C = canvas.ids_C[:length] != NO_TOKEN
        taken_C = canvas.taken_C[:length] & decided_C
        # A new token that no policy took was known before this forward.
        found_C = decided_C & ~known_C & ~taken_C
        rows_C2[taken_C, 0] = forward
        rows_C2[found_C, 0] = forward - 1
        new_C = taken_C | found_C
        certain_C = canvas.confidence_C[:length]
        rows_C2[new_C, 1] = np.where(certain_C > 0, certain_C, np.nan)[new_C]
        known_C[:] = decided_C

    def take(self, stop: int) -> np.ndarray:
        """Return the rows up to output position `stop` that were not sent before."""
        rows_P2 = self.rows_P2[self._sent : stop].copy()
        self._sent = stop
        return rows_P2
