"""Report what was compared: a line per prompt, a summary, and one JSON line."""

import json
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dllm_plugin.commands.installation import installation
from dllm_plugin.commands.verify.compare import Compared, Difference
from dllm_plugin.commands.verify.engine_side import Decode
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.reference.text import Result

Spell = Callable[[list[int]], str]


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
    """Round for the report; None where JSON has no number."""
    return float(f"{number:.3g}") if math.isfinite(number) else None


def print_prompt(number: int, verdict: Verdict, spell: Spell) -> None:
    """Print one prompt's line, and below it what differs."""
    if number == 1:
        print(
            f"{'prompt':>6} {'tokens':>6} {'forwards':>11} {'logits within':>14}  result"
        )
    forwards = f"{verdict.theirs.forwards}, {verdict.ours.forwards}"
    result = "same tokens" if verdict.same_tokens else "other tokens"
    if verdict.same_tokens and verdict.theirs.forwards != verdict.ours.forwards:
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
    print(textwrap.fill(text, 96, initial_indent=" " * 9, subsequent_indent=" " * 9))


def _sentence(verdict: Verdict, one: Difference, spell: Spell) -> str:
    place = one.position - len(verdict.theirs.prompt) + 1
    sides = []
    for side, proposal in (("engine", one.engine), ("reference", one.reference)):
        takes = "takes" if one.decided_by in (side, "both") else "leaves"
        what = "what it did not compute"
        if proposal is not None:
            what = f"{spell([proposal[0]])!r} at {proposal[1]:.4f}"
        sides.append(f"{side} {takes} {what}")
    cause = "a near tie, which rounding explains" if one.near_tie else "no near tie"
    where = f"token {place}, forward {one.forward}"
    return f"first difference: {where}: {', '.join(sides)}: {cause}"


def summary(verdicts: list[Verdict]) -> str:
    """Return in a sentence how many prompts agree."""
    right = others = ties = 0
    for one in verdicts:
        right += one.agrees
        others += not one.agrees
        if not one.agrees and one.compared.first is None and one.difference is not None:
            ties += one.difference.near_tie
    text = f"{right} of {len(verdicts)} prompts agree"
    if others:
        text += f"; {ties} of {others} others differ at near ties"
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
    return json.dumps(
        {
            "verify": model,
            "agree": all(verdict.agrees for verdict in verdicts),
            **installation(),
            **machine,
            "architecture": config.architecture,
            "decoding": decoding,
            "prompts": [verdict.to_json() for verdict in verdicts],
        }
    )
