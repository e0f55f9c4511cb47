"""Track forwards of a block that are launched before earlier results are known.

Full attention only. The scheduler assumes that the block goes on. If the block turns out
to be done, the forward is void: the device sees that the canvas starts elsewhere than the
host assumed, decides and counts nothing, and the refresh that follows computes the keys
and values again. So a forward is launched early only if the block is expected to need it.
If a step in flight is sure to end the block, the refresh of the next block is launched,
which nothing would repair.
"""

from collections import deque
from typing import NamedTuple


class OpenBlock(NamedTuple):
    """Store what is known of a request's current block.

    left   masked positions after the last step whose result is known
    taken  masked positions that this step decided
    known  steps of the block whose results are known
    """

    left: int
    taken: int
    known: int


class ForwardsInFlight:
    """Track launched forwards, and the progress of their blocks.

    num_void  forwards that were launched for nothing
    """

    def __init__(self) -> None:
        self.num_void = 0
        self._steps: deque[dict[str, int]] = deque()
        self._blocks: dict[str, OpenBlock] = {}

    def launch(self, starts: dict[str, int]) -> None:
        """Add a step: where the host expects each request's canvas to start."""
        self._steps.append(starts)

    def land(self) -> dict[str, int]:
        """Remove the oldest step in flight, and return its starts."""
        return self._steps.popleft()

    def expects_another(self, request_id: str, start: int) -> bool:
        """Return whether the block at `start` probably needs more than those in flight.

        Steps are expected to decide as many positions as the last step did.
        """
        ahead = self.count(request_id, start)
        block = self._blocks.get(request_id)
        return block is None or block.left > ahead * block.taken

    def is_last(self, request_id: str, start: int, steps: int) -> bool:
        """Return whether the last of `steps`, which takes all that is left, is in flight."""
        block = self._blocks.get(request_id)
        known = 0 if block is None else block.known
        return known + self.count(request_id, start) == steps

    def count(self, request_id: str, start: int) -> int:
        """Return how many forwards of the block at `start` are in flight."""
        return sum(step.get(request_id) == start for step in self._steps)

    def note(self, request_id: str, left: int) -> None:
        """Record how many masked positions a step has left in a block that goes on."""
        before = self._blocks.get(request_id)
        taken = 0 if before is None else max(before.left - left, 0)
        known = 1 if before is None else before.known + 1
        self._blocks[request_id] = OpenBlock(left, taken, known)

    def begin_block(self, request_id: str, size: int) -> None:
        """Begin the next block, of `size` positions."""
        before = self._blocks.get(request_id)
        # The last step has decided all that was left.
        self._blocks[request_id] = OpenBlock(
            size, size if before is None else before.left, 0
        )

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or starts its block again."""
        self._blocks.pop(request_id, None)


class BlockSpans(NamedTuple):
    """Store where a request's next forward lies, if its canvas starts at `start`.

    size      positions of its current block
    refresh   where a refresh starts, and how many canvas positions it computes
    of_block  the same for a forward that trusts the forward before it
    """

    start: int
    size: int
    refresh: tuple[int, int]
    of_block: tuple[int, int]


NO_SPANS = BlockSpans(-1, 0, (0, 0), (0, 0))  # of a request without a canvas so far
