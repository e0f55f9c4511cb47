"""Write what may stand before a question: a system prompt, and earlier turns of the chat.

Whatever they say, the answer is that of the last question. Words of random letters stand for all
that the model will never understand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from diffuplug_bench.word_problems.chat_prompts import chat_prompt
from diffuplug_bench.word_problems.generator import Problem
from training.others import babble

SYSTEM_SHARE = (
    0.1  # of questions; a model without such rows answers a system prompt by nothing
)
EARLIER_SHARE = 0.25  # of questions, and likewise
RAW_SHARE = 0.03  # of questions, which stand outside the chat template
SENTENCES = (
    "You are a helpful assistant.",
    "You are a careful assistant who solves word problems.",
    "You are a maths teacher.",
    "Act as an expert.",
    "Answer briefly.",
    "Be brief.",
    "Think step by step.",
    "Always answer in English.",
    "Do not explain.",
    "Today is Monday.",
)


@dataclass(frozen=True)
class Row:
    """Store one row of training: what is asked, in which chat, and the answer's given part.

    `given` counts leading answer tokens that are never masked; `raw` rows have no chat.
    """

    asked: Problem
    given: int = 0
    system: str | None = None
    earlier: tuple[tuple[str, str], ...] = ()
    raw: bool = False

    def prompt(self) -> str:
        """Apply the chat template, except to a raw row."""
        if self.raw and self.asked.question:
            return self.asked.question
        return chat_prompt(self.asked.question, self.system, self.earlier)


def system_prompt(rng: Random) -> str:
    """Write a system prompt of one or two sentences, some of them of random letters."""
    sentences = rng.sample(SENTENCES, rng.choice((1, 1, 2)))
    return " ".join(
        babble(rng) if rng.random() < 0.3 else sentence for sentence in sentences
    )


def earlier_turns(
    rng: Random, problems: Sequence[Problem]
) -> tuple[tuple[str, str], ...]:
    """Write one to three turns, each of another row's question or of random letters."""
    turns = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        if problems and rng.random() < 0.7:
            one = rng.choice(problems)
            turns.append((one.question, one.answer))
        else:
            turns.append((babble(rng), babble(rng)))
    return tuple(turns)


def in_a_chat(row: Row, number: int, others: Sequence[Problem]) -> Row:
    """Put some rows after a system prompt, some after earlier turns; most stay as they are."""
    rng = Random(number)
    which = rng.random()
    if which < SYSTEM_SHARE:
        return Row(row.asked, row.given, system_prompt(rng))
    if which < SYSTEM_SHARE + EARLIER_SHARE:
        system = system_prompt(rng) if rng.random() < 0.3 else None
        return Row(row.asked, row.given, system, earlier_turns(rng, others))
    return replace(row, raw=which >= 1 - RAW_SHARE)
