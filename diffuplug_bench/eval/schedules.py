"""Run ``diffuplug eval --questions FILE``: how accurate is a model, and with narrow windows?

``--schedule 32,16,8`` scores each of these widths. Any model and any file of questions: a JSON
line each, with ``question`` and ``answer``. An answer with a number is right when that is the
last number of the text, as of answers to GSM8K, and any other when the text holds it.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from diffuplug_bench import report
from diffuplug_bench.eval.scores import (
    LIMIT,
    MAX_TOKENS,
    Asked,
    Score,
    answers,
    progress_bar,
    score,
    start_in_process,
)
from diffuplug_bench.options import whole_numbers
from diffuplug_bench.problems import last_number
from diffuplug_bench.word_problems.generator import problems_of
from dllm_plugin import default_model
from dllm_plugin.commands.models import check_decoding
from dllm_plugin.commands.offline import add_adapter, stop_engine
from dllm_plugin.commands.options import text_of

BY_DEFAULT = "as set"


class Question(NamedTuple):
    """Pair a question with the answer that its file gives."""

    question: str
    answer: str

    def is_right(self, text: str) -> bool:
        """Return whether a text answers the question."""
        wanted, found = last_number(self.answer), last_number(text)
        if wanted is None:
            return self.answer.strip().casefold() in text.casefold()
        return found == wanted


def read_widths(text: str | None) -> list[int]:
    """Return the widths of ``32,16,8``, widest first, or none; ValueError names what is wrong."""
    if text is None:
        return []
    refusal = "--schedule must be widths of at least 1, as in 32,16,8"
    return whole_numbers(text, refusal)[::-1]


def set_widths(options: dict[str, Any], widths: list[int]) -> None:
    """Let an engine take these widths. Raises ValueError if it cannot."""
    dllm = options["additional_config"]["dllm"]
    if widths:
        dllm |= {"adaptive": "throughput", "max_window": max(widths)}
        if options["model"] == default_model.path():
            add_adapter(dllm)
        check_decoding(options["model"], dllm)


def read_questions(file: str | None, limit: int | None) -> Sequence[Asked]:
    """Return the questions of a file, or those of the bundled model."""
    if file is None:
        return problems_of(limit or LIMIT)
    questions = []
    text = text_of("--questions", file)
    for place, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            questions.append(Question(str(given["question"]), str(given["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(
                f"--questions {file}, line {place}, must be a JSON object with question and answer"
            ) from None
    if not questions:
        raise ValueError(f"--questions {file} holds no question")
    return questions[:limit]


def run(
    options: dict[str, Any],
    widths: list[int],
    questions: Sequence[Asked],
    verbose: bool,
) -> int:
    """Decode all questions, at each width if there are some; print a table and one JSON line."""
    from dllm_plugin.commands.phases import screen

    scores: dict[int | str, Score] = {}
    with screen(verbose) as shown:
        llm = start_in_process(options, shown.log)
        for width in widths:
            bar = progress_bar(shown, f"width {width}")
            asked = {"dllm_schedule": [width]}
            found = answers(llm, questions, MAX_TOKENS, bar, asked)
            scores[width] = score(found, questions)
        if not widths:
            bar = progress_bar(shown, "questions")
            found = answers(llm, questions, MAX_TOKENS, bar)
            scores[BY_DEFAULT] = score(found, questions)
        stop_engine(llm)
    table = []
    for key, one in scores.items():
        table.append({"width": key} | one._asdict())
    print(report.table_of("schedules", table))
    rows = {str(key): one._asdict() for key, one in scores.items()}
    record = {
        "benchmark": "eval_schedule" if widths else "eval_questions",
        "model": options["model"],
        "problems": len(questions),
    }
    print(json.dumps(record | {"dtype": options.get("dtype", "auto"), "rows": rows}))
    return 0
