"""Compare what engine and second implementation computed and decided for one prompt.

How much two right implementations may differ is what rounding does to this very checkpoint: how far
the second implementation is from itself in float32. In float32 it is derived from the dtype: the
roundings of layers add up like independent errors.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_plugin.commands.verify.engine_side import Decided
from dllm_plugin.reference.text import Step

GEMM = 64 * 2.0**-24  # of sums in float32, whatever is stored
SURE = 4  # times the expected rounding is no rounding
FEW_ROWS = 0.1  # that a router's rounding may change in a mixture of 16 bits


def rounding(dtype: torch.dtype, depth: int) -> float:
    """Return the relative difference that rounding explains behind so many layers."""
    return float((torch.finfo(dtype).eps / 2 + GEMM) * (depth + 1) ** 0.5)


States = tuple[list[Tensor], Tensor]  # behind the embedding and each layer, and logits


class Compared(NamedTuple):
    """Hold how far the first forward's numbers are apart.

    logits    largest difference of a logit
    rounding  largest one that rounding made in the second implementation, or may make
    layers    largest relative difference of a row behind the embedding and each layer
    first     where rows first differ by more than rounding explains; None: nowhere
    """

    logits: float
    rounding: float
    layers: list[float]
    first: str | None


def compare_first_forward(
    theirs: tuple[list[dict[int, Tensor]], dict[int, Tensor]],
    ours: States,
    exact: States,
    stop: int,
    is_mixture: bool,
) -> Compared:
    """Compare hidden states and logits of the positions before `stop` that the engine kept.

    `exact` is what the second implementation computes in float32: `ours`, if it does so anyway.
    """
    positions, dtype = [p for p in sorted(theirs[1]) if p < stop], ours[0][0].dtype
    found = [
        torch.stack([one[p] for p in positions]).float()
        for one in [*theirs[0], theirs[1]]
    ]
    wanted, truth = (
        [state[positions].float().cpu() for state in [*side[0], side[1]]]
        for side in (ours, exact)
    )
    # In 16 bits a router may take another expert for single rows, and both are right.
    spared = FEW_ROWS if is_mixture and dtype != torch.float32 else 0.0
    first, layers = None, []
    for depth, (engine, second, true) in enumerate(
        zip(found, wanted, truth, strict=True)
    ):
        apart = _relative(engine, second)
        explained = float(_relative(second, true).max())
        layers.append(float(apart.max()))
        allowed = SURE * max(explained, rounding(dtype, depth))
        # Not-a-number is never right.
        if first is None and float((~(apart <= allowed)).float().mean()) > spared:
            first = _place(depth, len(found))
    by_dtype = rounding(dtype, len(found)) * float(wanted[-1].abs().max())
    measured = float((wanted[-1] - truth[-1]).abs().max())
    largest = float((found[-1] - wanted[-1]).abs().max())
    return Compared(largest, max(by_dtype, measured), layers[:-1], first)


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the relative distance of each row."""
    # Rows may be all zeros: tied embeddings that never propose the mask.
    scale = wanted.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (found - wanted).norm(dim=-1) / scale


def _place(depth: int, count: int) -> str:
    if depth == 0:
        return "the embedding"
    # Checkpoints count layers from 0.
    if depth == count - 1:
        return "the logits (final norm or LM head)"
    return f"layer {depth - 1}"


@dataclass
class Difference:
    """Hold the first decision in which both differ.

    Proposals are (token, confidence); None where a side did not compute the position.
    """

    forward: int  # counted from 1, among those that decided anything
    position: int
    engine: tuple[int, float] | None
    reference: tuple[int, float] | None
    decided_by: str  # "both", "engine" or "reference"
    near_tie: bool

    def to_json(self) -> dict[str, Any]:
        """Return this as plain data."""
        return dict(vars(self))


class Watcher:
    """Find the first decision that differs, while the second implementation decodes."""

    def __init__(
        self, decided: list[Decided], end: int, mask_id: int, moves: float
    ) -> None:
        self.theirs = [one for one in decided if any(p < end for p in one.new)]
        self.end, self.mask_id = end, mask_id
        self.moves = moves  # how far rounding moves a logit
        self.forward = 0
        self.known: dict[int, int] = {}
        self.difference: Difference | None = None

    def __call__(self, step: Step) -> None:
        """Compare one forward with the engine's; those that decide nothing are not counted."""
        new = self._inside(step.new)
        new = {p: token for p, token in new.items() if self.known.get(p) != token}
        self.known |= new
        if self.difference is not None or not new:
            return
        theirs = (
            self.theirs[self.forward]
            if self.forward < len(self.theirs)
            else Decided({}, {})
        )
        self.forward += 1
        their_new = self._inside(theirs.new)
        if new == their_new:
            return
        apart = [
            p for p in sorted({*new, *their_new}) if new.get(p) != their_new.get(p)
        ]
        position = apart[0]
        taken = (position in their_new, position in new)
        self.difference = Difference(
            self.forward,
            position,
            theirs.best.get(position),
            self._proposal(step, position),
            {(True, True): "both", (True, False): "engine", (False, True): "reference"}[
                taken
            ],
            near_tie=all(
                self._is_near(step, p, new.get(p), their_new.get(p)) for p in apart
            ),
        )

    def _inside(self, new: dict[int, int]) -> dict[int, int]:
        return {p: token for p, token in new.items() if p < self.end}

    def _row(self, step: Step, position: int) -> Tensor | None:
        if position not in step.rows:
            return None
        row = step.rows[position].float().clone()
        row[self.mask_id] = float("-inf")
        return row

    def _proposal(self, step: Step, position: int) -> tuple[int, float] | None:
        row = self._row(step, position)
        if row is None:
            return None
        probability, token = row.softmax(-1).max(-1)
        return int(token), float(probability)

    def _is_near(
        self, step: Step, position: int, ours: int | None, theirs: int | None
    ) -> bool:
        """Return whether rounding explains that one position was decided in another way."""
        row = self._row(step, position)
        if row is None:
            return False
        if ours is not None and theirs is not None:
            return float(row[ours] - row[theirs]) <= self.moves
        # A probability moves by at most a quarter of what its logit moves by.
        return step.closest <= self.moves / 4
