"""Read the template of a request: which positions of its answer are given.

A *gap* is a run of positions to fill, a *pin* a token that is given, the *tail* what is given
after the last gap. The answer ends with the last gap; the tail is seen and never emitted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dllm_plugin.config.options import FILL


def end_of_gaps(token_ids: Sequence[int]) -> int:
    """Return where the last gap stops; 0 without a gap."""
    if FILL not in token_ids:
        return 0
    return len(token_ids) - token_ids[::-1].index(FILL)


@dataclass(frozen=True)
class Template:
    """Store the positions after a prompt: token ids, and `FILL` for a position to fill."""

    token_ids: tuple[int, ...]

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Return where the gaps start and stop."""
        found, start = [], None
        for place, token in enumerate((*self.token_ids, 0)):
            if token == FILL and start is None:
                start = place
            elif token != FILL and start is not None:
                found.append((start, place))
                start = None
        return found

    @property
    def end(self) -> int:
        """Return where the last gap stops, and the answer with it; 0 without a gap."""
        return end_of_gaps(self.token_ids)

    @property
    def tail(self) -> int:
        """Return how many tokens are given after the last gap."""
        return len(self.token_ids) - self.end

    def given_blocks(self, block_length: int) -> list[int]:
        """Return the tokens of the leading blocks that are given as a whole."""
        first = self.gaps[0][0]
        return list(self.token_ids[: first - first % block_length])

    def ends(self, stop_token_ids: Iterable[int]) -> list[int]:
        """Return which of the tokens end the answer where they are decided.

        None do with several gaps, since what stands after the first is wanted, and none that are
        given before a single gap.
        """
        if len(self.gaps) > 1:
            return []
        before = self.token_ids[: self.gaps[0][0]]
        return [token for token in stop_token_ids if token not in before]
