"""Ask checkpoints word problems, and score what they answer."""

import re
import statistics
from typing import Any

from diffuplug_bench.word_problems.generator import Problem, extract_answer
from dllm_plugin.commands.offline import prompt_of

NUMBER = re.compile(r"(?:(?<![\w.])-)?\d[\d,]*(?:\.\d+)?")
NO_ACCURACY = "not measured: the checkpoint has no chat template to put a problem in"


def problem_prompts(tokenizer: Any, problems: list[Problem]) -> list[list[int]]:
    """Return prompts of word problems, as chats if the checkpoint has a chat template."""
    return [prompt_of(tokenizer, item.question) for item in problems]


def score(
    tokenizer: Any, answers: list[list[int]], problems: list[Problem], is_bundled: bool
) -> dict[str, Any]:
    """Return the share of answers whose number is right, or why there is none."""
    if tokenizer.chat_template is None:
        return {"accuracy": None, "accuracy_note": NO_ACCURACY}
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    pairs = zip(texts, problems, strict=True)
    right = [number_of(text, is_bundled) == item.result for text, item in pairs]
    return {"accuracy": statistics.mean(right)}


def number_of(text: str, is_bundled: bool) -> float | None:
    """Return the number after the last ``####``; other models: the last number of the text.

    Only the bundled model was trained to write ``####``.
    """
    marked = extract_answer(text)
    return marked if marked is not None or is_bundled else last_number(text)


def last_number(text: str) -> float | None:
    """Return the last number of a text, thousands separated by commas or not."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
