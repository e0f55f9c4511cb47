"""Generate word problems: everyday stories with exact integer arithmetic in several steps.

`problem(seed)` is deterministic. A problem is a story of 2 to 4 arithmetic steps; its answer has
one short sentence per step and ends with the line ``#### RESULT``; `ask_in_json` asks for the same
equations as JSON. Training and evaluation seeds come from disjoint ranges (`train_seeds`,
`eval_seeds`). Standard library only.
"""

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from diffuplug_bench.word_problems.stories import Draft, bus, pages, shop, trip, work
from diffuplug_bench.word_problems.things import things

EVAL_BASE = 1 << 40
# Story: relative frequency.
_STORIES = {things: 10, shop: 3, work: 2, pages: 2, bus: 2, trip: 2}
JSON_REQUEST = " Answer in JSON."  # what a question ends with that wants ANSWER_SCHEMA
ANSWER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": {"type": "string"}},
        "answer": {"type": "integer"},
    },
    "required": ["steps", "answer"],
    "additionalProperties": False,
}
_RESULT = re.compile(r"####\s*(-?\d+)")
_EQUATION = re.compile(r"\d+ [-+*/] \d+ = \d+")


@dataclass(frozen=True)
class Problem:
    """A word problem: the question, the worked answer, and the number it ends with."""

    question: str
    answer: str
    result: int
    in_json: bool = False

    def is_right(self, text: str) -> bool:
        """Return whether a text gives the number that is asked for, in the form asked for."""
        read = extract_json_answer if self.in_json else extract_answer
        return read(text) == self.result


def problem(seed: int) -> Problem:
    """Generate the problem of this seed; the same seed always gives the same problem."""
    rng = random.Random(seed)
    story = rng.choices(list(_STORIES), weights=list(_STORIES.values()))[0]
    draft = Draft(rng)
    story(draft, rng.choice((2, 2, 3, 3, 4)))
    answer = "\n".join([*draft.steps, f"#### {draft.value}"])
    return Problem(" ".join(draft.sentences), answer, draft.value)


def ask_in_json(asked: Problem) -> Problem:
    """Ask a problem for ``{"steps": ["40 - 7 = 33", ...], "answer": 12}``, spaced as json.dumps."""
    steps = _EQUATION.findall(asked.answer)
    answer = json.dumps({"steps": steps, "answer": asked.result})
    return Problem(asked.question + JSON_REQUEST, answer, asked.result, in_json=True)


def train_seeds(count: int, start: int = 0) -> range:
    """Return seeds for training, all below `EVAL_BASE`."""
    if not 0 <= start <= start + count <= EVAL_BASE:
        raise ValueError(
            f"training seeds must lie in [0, {EVAL_BASE}), got {start} + {count}"
        )
    return range(start, start + count)


def eval_seeds(count: int) -> range:
    """Return seeds for evaluation, from `EVAL_BASE` on; training never uses them."""
    return range(EVAL_BASE, EVAL_BASE + count)


def problems_of(count: int) -> list[Problem]:
    """Return problems of the seeds for evaluation."""
    return [problem(seed) for seed in eval_seeds(count)]


def extract_answer(text: str) -> int | None:
    """Return the number after the last ``####``, or None if there is none."""
    found = _RESULT.findall(text)
    return int(found[-1]) if found else None


def extract_json_answer(text: str) -> int | None:
    """Return the answer of a JSON object, or None if the text is none or has no whole number."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    answer = found.get("answer") if isinstance(found, dict) else None
    return answer if type(answer) is int else None
