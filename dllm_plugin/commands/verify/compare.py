"""Compare what engine and second implementation computed and decided, and report it.

How much two right implementations may differ is what rounding does to this very checkpoint: how far
the second implementation is from itself in float32. In float32 it is derived from the dtype: the
roundings of layers add up like independent errors.
"""

import json
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_plugin.commands.installation import installation
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.reference.model import States
from dllm_plugin.reference.text import Result, Step

from .engine_side import Decided, Decode

Spell = Callable[[list[int]], str]
GEMM = 64 * 2.0**-24  # of sums in float32, whatever is stored
SURE = 4  # times the expected rounding is no rounding
FEW_ROWS = 0.1  # that a router's rounding may change in a mixture of 16 bits


def rounding(dtype: torch.dtype, depth: int) -> float:
    """Return the relative difference that rounding explains after so many layers."""
    return float((torch.finfo(dtype).eps / 2 + GEMM) * (depth + 1) ** 0.5)


class Compared(NamedTuple):
    """Store how far the first forward's numbers are apart.

    logits    largest difference of a logit
    rounding  largest difference that rounding made in the second implementation, or may make
    layers    largest relative difference of a row after the embedding and each layer
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
    dtype = ours[0][0].dtype
    found = []
    positions = [p for p in sorted(theirs[1]) if p < stop]
    for rows in (*theirs[0], theirs[1]):
        found.append(torch.stack([rows[p] for p in positions]).float())
    wanted = _rows_of(ours, positions)
    truth = _rows_of(exact, positions)
    # In 16 bits a router may take another expert for single rows, and both are right.
    spared = FEW_ROWS if is_mixture and dtype != torch.float32 else 0.0
    first, layers = None, []
    triples = zip(found, wanted, truth, strict=True)
    for depth, (engine, second, true) in enumerate(triples):
        apart = _relative(engine, second)
        explained = float(_relative(second, true).max())
        layers.append(float(apart.max()))
        allowed = SURE * max(explained, rounding(dtype, depth))
        # Not-a-number is never right.
        wrong = float((~(apart <= allowed)).float().mean())
        if first is None and wrong > spared:
            first = _place(depth, len(found))
    by_dtype = rounding(dtype, len(found)) * float(wanted[-1].abs().max())
    measured = float((wanted[-1] - truth[-1]).abs().max())
    largest = float((found[-1] - wanted[-1]).abs().max())
    return Compared(largest, max(by_dtype, measured), layers[:-1], first)


def _rows_of(states: States, positions: list[int]) -> list[Tensor]:
    """Return the rows of some positions, of each layer and of the logits."""
    return [state[positions].float().cpu() for state in (*states[0], states[1])]


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the relative distance of each row."""
    # Rows may be all zeros: tied embeddings that never propose the mask.
    scale = wanted.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (found - wanted).norm(dim=-1) / scale


def _place(depth: int, count: int) -> str:
    if depth == 0:
        return "the embedding"
    if depth == count - 1:
        return "the logits (final norm or LM head)"
    return f"layer {depth - 1}"  # checkpoints count layers from 0


@dataclass
class Difference:
    """Store the first decision in which both differ.

    Proposals are (token, confidence); None if a side did not compute the position.
    """

    forward: int  # counted from 1, among those that decided anything
    position: int
    engine: tuple[int, float] | None
    reference: tuple[int, float] | None
    decided_by: str  # "both", "engine" or "reference"
    near_tie: bool
    # Two logits, or a confidence and what decides, and how far rounding moves them; None: unknown.
    apart: float | None
    rounding: float | None


class Watcher:
    """Find the first decision that differs, while the second implementation decodes."""

    def __init__(
        self,
        decided: list[Decided],
        end: int,
        mask_id: int,
        moves: float,
        by_entropy: bool = False,
    ) -> None:
        self.theirs = [one for one in decided if any(p < end for p in one.new)]
        self.end, self.mask_id = end, mask_id
        self.moves = moves  # how far rounding moves a logit
        self.by_entropy = by_entropy  # positions are chosen
        self.forward = 0
        self.known: dict[int, int] = {}
        self.difference: Difference | None = None

    def __call__(self, step: Step) -> None:
        """Compare one forward with the engine's; those that decide nothing are not counted."""
        new = {}
        for p, token in self._inside(step.new).items():
            if self.known.get(p) != token:
                new[p] = self.known[p] = token
        if self.difference is not None or not new:
            return
        theirs = Decided({}, {})
        if self.forward < len(self.theirs):
            theirs = self.theirs[self.forward]
        self.forward += 1
        their_new = self._inside(theirs.new)
        if new == their_new:
            return
        apart = [p for p in {*new, *their_new} if new.get(p) != their_new.get(p)]
        sizes = {}
        for p in apart:
            sizes[p] = self._apart(step, p, new.get(p), their_new.get(p))
        is_near = all(gap <= moved for gap, moved in sizes.values())
        position, decided_by = min(apart), "both"
        if position not in new:
            decided_by = "engine"
        elif position not in their_new:
            decided_by = "reference"
        engine, ours = theirs.best.get(position), self._proposal(step, position)
        gap, moved = sizes[position]
        sides = engine, ours, decided_by
        self.difference = Difference(
            self.forward, position, *sides, is_near, _short(gap), _short(moved)
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

    def _apart(
        self, step: Step, position: int, ours: int | None, theirs: int | None
    ) -> tuple[float, float]:
        """Return how far apart the decisions of a position are, and how far rounding moves that."""
        row = self._row(step, position)
        if row is None:
            return math.inf, self.moves
        if ours is not None and theirs is not None:
            # Below 0 is a token that the reference bans: as far away.
            return abs(float(row[ours] - row[theirs])), self.moves
        if self.by_entropy:
            return step.closest, self.moves * _spread(row)
        # A probability moves by at most a quarter of what its logit moves by.
        return step.closest, self.moves / 4


def _spread(row: Tensor) -> float:
    """Return how far an entropy moves, nearly at most, if every logit moves by up to 1."""
    share, logs = row.softmax(-1), row.log_softmax(-1)
    entropy = torch.special.entr(share).sum()
    return float((share * (logs + entropy)).nan_to_num().abs().sum())


@dataclass
class Verdict:
    """Store both sides of one prompt."""

    theirs: Decode
    ours: Result
    compared: Compared
    difference: Difference | None

    @property
    def same_tokens(self) -> bool:
        """Return whether both wrote the same answer."""
        return self.theirs.tokens == self.ours.tokens

    @property
    def agrees(self) -> bool:
        """Return whether answer, forwards and the numbers of the first forward are the same."""
        same_path = self.theirs.forwards == self.ours.forwards
        return self.same_tokens and same_path and self.compared.first is None

    def to_json(self) -> dict[str, Any]:
        """Return this as plain data, without texts."""
        return {
            "prompt_tokens": len(self.theirs.prompt),
            "tokens": [len(self.theirs.tokens), len(self.ours.tokens)],
            "same_tokens": self.same_tokens,
            "forwards": [self.theirs.forwards, self.ours.forwards],
            "logits_difference": _short(self.compared.logits),
            "logits_rounding": _short(self.compared.rounding),
            "layers": [_short(apart) for apart in self.compared.layers],
            "first_difference": self.compared.first,
            "difference": self.difference and vars(self.difference),
        }


def _short(number: float) -> float | None:
    """Round for the report; None if JSON has no number."""
    return float(f"{number:.3g}") if math.isfinite(number) else None


HEADER = f"{'prompt':>6} {'tokens':>6} {'forwards':>11} {'logits within':>14}  result"


def print_prompt(number: int, verdict: Verdict, spell: Spell) -> None:
    """Print one prompt's line, and below it what differs."""
    if number == 1:
        print(HEADER)
    forwards = f"{verdict.theirs.forwards}, {verdict.ours.forwards}"
    result = "same tokens" if verdict.same_tokens else "other tokens"
    same_path = verdict.theirs.forwards == verdict.ours.forwards
    if verdict.same_tokens and not same_path:
        result += ", other forwards"
    print(
        f"{number:>6} {len(verdict.theirs.tokens):>6} {forwards:>11} "
        f"{verdict.compared.logits:>14.2g}  {result}"
    )
    if verdict.compared.first is not None:
        _note(f"hidden states first differ at {verdict.compared.first}")
    if verdict.difference is not None and not verdict.agrees:
        _note(_sentence(verdict, verdict.difference, spell))


def _note(text: str) -> None:
    indent = " " * 9
    filled = textwrap.fill(text, 96 - len(indent))
    print(textwrap.indent(filled, indent))


def _sentence(verdict: Verdict, one: Difference, spell: Spell) -> str:
    place = one.position - len(verdict.theirs.prompt) + 1
    sides = []
    for side, proposal in (("engine", one.engine), ("reference", one.reference)):
        takes = "takes" if one.decided_by in (side, "both") else "leaves"
        what = "what it did not compute"
        if proposal is not None:
            what = f"{spell([proposal[0]])!r} at {proposal[1]:.4f}"
        sides.append(f"{side} {takes} {what}")
    cause = "a near tie" if one.near_tie else "no near tie"
    apart, rounding = one.apart, one.rounding
    if apart is not None and rounding is not None:
        cause += f" ({apart:.2g} apart, rounding moves up to {rounding:.2g})"
    where = f"token {place}, forward {one.forward}"
    return f"first difference: {where}: {', '.join(sides)}: {cause}"


def summary(verdicts: list[Verdict]) -> str:
    """Return in a sentence how many prompts agree."""
    others = [one for one in verdicts if not one.agrees]
    ties = 0
    for one in others:
        if one.compared.first is None and one.difference is not None:
            ties += one.difference.near_tie
    text = f"{len(verdicts) - len(others)} of {len(verdicts)} prompts agree"
    if others:
        text += f"; {ties} of {len(others)} others differ at near ties"
    if ties:
        text += ", which rounding explains: --dtype float32 has next to none"
    return text


def json_line(
    model: str,
    config: DecodeConfig,
    machine: dict[str, Any],
    verdicts: list[Verdict],
) -> str:
    """Return everything that a bug report needs, without the prompts' texts."""
    numbers = config.defaults
    decoding = {
        "strategy": config.strategy,
        "policy": config.policy,
        "block_length": numbers.block_length,
        "canvas_length": config.canvas_length,
        "threshold": numbers.threshold,
        "steps": numbers.steps,
        "adapter": config.lora_path is not None,
    }
    report = {
        "verify": model,
        "agree": all(verdict.agrees for verdict in verdicts),
        **installation(),
        **machine,
        "architecture": config.architecture,
        "decoding": decoding,
        "prompts": [verdict.to_json() for verdict in verdicts],
    }
    return json.dumps(report)
