"""Our own generator of multi-step word problems: everyday stories with exact integer arithmetic.

`problem(seed)` is deterministic. A problem is a story of 2 to 4 arithmetic steps; its answer has
one short sentence per step and ends with the line ``#### RESULT``. Training and evaluation seeds
come from disjoint ranges (`train_seeds`, `eval_seeds`). Standard library only.
"""

import random
import re
from dataclasses import dataclass

from dllm_plugin.commands.stories import Draft, bus, pages, shop, trip, work
from dllm_plugin.commands.things import things

EVAL_BASE = 1 << 40
_FAMILIES = {things: 10, shop: 3, work: 2, pages: 2, bus: 2, trip: 2}  # family: how often
_RESULT = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True)
class Problem:
    """One word problem: what is asked, the worked answer, and the number it ends with."""

    question: str
    answer: str
    result: int


def problem(seed: int) -> Problem:
    """The problem of this seed; the same seed always gives the same problem."""
    rng = random.Random(seed)
    family = rng.choices(list(_FAMILIES), weights=list(_FAMILIES.values()))[0]
    draft = Draft(rng)
    family(draft, rng.choice((2, 2, 3, 3, 4)))
    answer = "\n".join([*draft.steps, f"#### {draft.value}"])
    return Problem(" ".join(draft.said), answer, draft.value)


def train_seeds(count: int, start: int = 0) -> range:
    """Seeds for training: below `EVAL_BASE`."""
    if not 0 <= start <= start + count <= EVAL_BASE:
        raise ValueError(f"training seeds must lie in [0, {EVAL_BASE}), got {start} + {count}")
    return range(start, start + count)


def eval_seeds(count: int) -> range:
    """Seeds for evaluation: from `EVAL_BASE` on, never used in training."""
    return range(EVAL_BASE, EVAL_BASE + count)


def extract_answer(text: str) -> int | None:
    """The number after the last ``####``, or None when there is none."""
    found = _RESULT.findall(text)
    return int(found[-1]) if found else None
