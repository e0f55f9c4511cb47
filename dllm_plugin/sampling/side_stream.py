"""Work of a step that needs nothing of its forward, on a CUDA stream beside it.

What is planned before the logits is known once the step before has decided: some twenty small
kernels, which take 1 % of a step if they wait for the forward, and nothing while it runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """One stream per owner; on CPUs there is nothing to overlap, and work runs where it stands.

    Tensors that the work makes serve the rest of its step alone. Their memory comes from the
    stream's own pool, and is used again in a later step, behind all that the main stream held
    when that step began.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._known: torch.cuda.Event | None = None

    def mark(self) -> None:
        """From here on the work may start: all it reads is queued on the main stream."""
        if self._stream is not None:
            self._known = torch.cuda.Event()
            self._known.record()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Queue work behind the last mark, else behind all; what follows waits for its results."""
        if self._stream is None:
            yield
            return
        if self._known is None:
            self.mark()
        assert self._known is not None
        self._stream.wait_event(self._known)
        self._known = None
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
