"""Hold where forwards of a block lie under full attention, once the host has found it."""

from typing import NamedTuple


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
