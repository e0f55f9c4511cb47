"""Overlap with the forward what a step does before it needs logits, on a CUDA stream of its own.

All of it is known once the step before has decided. It is some twenty small kernels, which take
1 % of a step if they wait for the forward, and no time if they run while it does. They may write
nothing that the forward reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Run work on one CUDA stream of the owner's; on CPUs, in place.

    The tensors that the work makes may be read until the end of its step. Their memory comes from
    the stream's own pool, and is used again in a later step, after everything that the main stream
    held when that step began.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._may_start: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Record the start of the work: all that it reads is queued on the main stream."""
        if self._stream is not None:
            self._may_start = torch.cuda.Event()
            self._may_start.record()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Queue work after the last mark, or after everything if there is none since the last run.

        What the main stream is given afterwards waits for the results.
        """
        if self._stream is None:
            yield
            return
        if self._may_start is None:
            self.mark()
        assert self._may_start is not None
        self._stream.wait_event(self._may_start)
        self._may_start = None
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
