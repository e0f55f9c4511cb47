"""Let someone look on while a loop decodes, and note how close its decisions were."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Step(NamedTuple):
    """Hold what one forward decided.

    new      position -> token that was written
    rows     position -> logits, of those that it could have decided
    closest  how close the choice of positions was to another one, in units of their score
    """

    new: dict[int, int]
    rows: dict[int, Tensor]
    closest: float


@dataclass(kw_only=True)
class Watched:
    """Hold what a loop notes for others; the base of texts.

    margin   how close the closest decision was, in logits or probability
    watch    called behind each forward
    """

    margin: float = float("inf")
    watch: Callable[[Step], None] | None = None
    written: dict[int, int] = field(default_factory=dict)
    closest: float = float("inf")

    def close_call(self, *gaps: float) -> None:
        """Note how far a decision was from another one."""
        self.margin = min(self.margin, *(abs(gap) for gap in gaps), self.margin)

    def close_choice(self, *gaps: float) -> None:
        """Note how far the choice of positions was from another one."""
        self.close_call(*gaps)
        self.closest = min(self.closest, *(abs(gap) for gap in gaps), self.closest)

    def tell(self, logits: Tensor | Mapping[int, Tensor], positions: list[int]) -> None:
        """Tell who looks on about a forward whose logits have a row per position."""
        if self.watch is not None:
            rows = {p: logits[p] for p in positions}
            self.watch(Step(self.written, rows, self.closest))
        self.written, self.closest = {}, float("inf")
