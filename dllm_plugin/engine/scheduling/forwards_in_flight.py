"""Launch the next forward of a block before the result of this one is known: full attention.

The scheduler assumes that the block goes on. If it turns out to be done, the forward behind it is
void: the device sees that the canvas does not start where the host took it to, decides nothing and
counts nothing, and what keys and values it wrote are computed again by the refresh that follows. A
forward is launched so only where the block is expected to need it. Where a step in flight is sure
to end the block, the refresh of the next one is launched, which nothing would repair.

Hold where forwards of a block lie under full attention, once the host has found it.
"""

from collections import deque
from typing import NamedTuple

from vllm.v1.outputs import ModelRunnerOutput


class OpenBlock(NamedTuple):
    """Hold what is known of a request's current block.

    left   masked positions behind the last known step
    taken  masked positions that this step decided
    known  steps of this block whose results are known
    """

    left: int
    taken: int
    known: int


class ForwardsInFlight:
    """Hold where the canvases of all launched forwards start, and how far their blocks are.

    num_void  forwards that were launched for nothing
    """

    def __init__(self) -> None:
        self.num_void = 0
        self._steps: deque[dict[str, int]] = deque()
        self._blocks: dict[str, OpenBlock] = {}

    def launch(self, starts: dict[str, int]) -> None:
        """Note a step: where the host takes each request's canvas to start."""
        self._steps.append(starts)

    def land(self) -> dict[str, int]:
        """Return what was noted of the first step whose result was not known."""
        return self._steps.popleft()

    def expects_another(self, request_id: str, start: int) -> bool:
        """Return whether the block at `start` is likely to need a forward behind those in flight.

        Steps are expected to decide as many positions as the last one did.
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
        """Note how many masked positions a step has left in a block that goes on."""
        before = self._blocks.get(request_id)
        taken = 0 if before is None else max(before.left - left, 0)
        known = 1 if before is None else before.known + 1
        self._blocks[request_id] = OpenBlock(left, taken, known)

    def begin_block(self, request_id: str, size: int) -> None:
        """Note that a block is done and the next one has `size` positions."""
        before = self._blocks.get(request_id)
        # The last step has decided all that was left.
        self._blocks[request_id] = OpenBlock(
            size, size if before is None else before.left, 0
        )

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or starts its block again."""
        self._blocks.pop(request_id, None)


def take_left(results: ModelRunnerOutput) -> dict[str, int]:
    """Take the masked positions that blocks have left out of a step's counts of broken positions.

    The sampler sends them as negative numbers.
    """
    counts = results.num_nans_in_logits or {}
    left = {request_id: -count for request_id, count in counts.items() if count < 0}
    counts.update(dict.fromkeys(left, 0))
    return left


class BlockSpans(NamedTuple):
    """Hold where a request's next forward lies, as long as its canvas starts at `start`.

    size      positions of its current block
    refresh   where a refresh starts, and how many canvas positions it computes
    of_block  the same of a forward that trusts the one before
    """

    start: int
    size: int
    refresh: tuple[int, int]
    of_block: tuple[int, int]
