"""Compare drafts with automata for each kind of grammar, by right answers and speed.

    python benchmarks/grammar_modes.py --limit 500

The bundled model answers its unseen word problems under each grammar, decoded by drafts and by
an automaton. `auto` follows the table (docs/structured-output.md).
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

from structured_output import MAX_TOKENS, OWN_FORM, from_json

from diffuplug_bench.eval.scores import start
from diffuplug_bench.word_problems.generator import (
    ANSWER_SCHEMA,
    Problem,
    ask_in_json,
    extract_answer,
    problems_of,
)
from dllm_plugin import default_model
from dllm_plugin.commands.offline import conversation, num_forwards, stop_engine

ENGINES: dict[str, dict[str, Any]] = {
    "d2f": {
        "strategy": "d2f",
        "lora_path": default_model.adapter_path(),
        "threshold": 0.9,
    },
    "dual_cache": {"strategy": "dual_cache"},
}
JSON_FORM = r'\{"steps": \["[^"\\]+"(, "[^"\\]+"){0,5}\], "answer": -?[0-9]{1,6}\}'
OWN_EBNF = r"""
root ::= line+ "#### " "-"? [0-9]+
line ::= [^\n#{}]+ "\n"
"""


def same_grammar(**grammar: Any) -> Callable[[Problem], dict[str, Any]]:
    """Return a function that gives every problem one grammar."""
    return lambda _: grammar


def worked_answers(one: Problem) -> dict[str, Any]:
    """Return a choice of four worked answers that differ in their last number."""
    right = str(one.result)
    head = one.answer.removesuffix(right)
    return {"choice": [head + str(number) for number in numbers_near(one)]}


def numbers_near(one: Problem) -> list[int]:
    """Return the right number among three others, in an order that tells nothing."""
    found = [one.result, one.result + 1, one.result + 10, abs(one.result - 2)]
    return sorted(dict.fromkeys(found), key=lambda number: (number * 7919) % 97)


class Case:
    """Store a kind of grammar, how it is asked for, and how answers are read.

    grammar  of a problem
    read     the number of a text; raises ValueError if it has none
    """

    def __init__(
        self,
        grammar: Callable[[Problem], dict[str, Any]],
        read: Callable[[str], int | None],
        is_asked: bool = False,
        modes: tuple[str, ...] = ("drafts", "automaton"),
    ) -> None:
        self.grammar, self.read = grammar, read
        self.is_asked, self.modes = is_asked, modes


CASES = {
    "JSON, asked for": Case(same_grammar(json=ANSWER_SCHEMA), from_json, True),
    "JSON, schema only": Case(same_grammar(json=ANSWER_SCHEMA), from_json),
    "regex, the model's form": Case(same_grammar(regex=OWN_FORM), extract_answer),
    "regex, JSON, asked for": Case(same_grammar(regex=JSON_FORM), from_json, True),
    "regex, JSON, not asked for": Case(same_grammar(regex=JSON_FORM), from_json),
    "choice, worked answers": Case(worked_answers, extract_answer),
    "EBNF, the model's form": Case(
        same_grammar(grammar=OWN_EBNF), extract_answer, modes=("drafts",)
    ),
}


def measure(llm: Any, problems: list[Problem], case: Case, mode: str) -> dict[str, Any]:
    """Decode all problems in one batch; return a row of the table."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    chats, params = [], []
    for one in problems:
        asked = ask_in_json(one) if case.is_asked else one
        chats.append(conversation(asked.question))
        params.append(
            SamplingParams(
                temperature=0.0,
                max_tokens=MAX_TOKENS,
                structured_outputs=StructuredOutputsParams(**case.grammar(one)),
                extra_args={"dllm_grammar": mode},
            )
        )
    began = time.perf_counter()
    outputs = llm.chat(chats, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    right = tokens = 0
    for one, output in zip(problems, outputs, strict=True):
        answer = output.outputs[0]
        tokens += len(answer.token_ids)
        try:
            right += case.read(answer.text) == one.result
        except (ValueError, KeyError, TypeError):
            continue
    return {
        "right": right,
        "problems": len(problems),
        "tokens_per_forward": round(tokens / sum(map(num_forwards, outputs)), 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=500, help="number of problems")
    parser.add_argument("--strategy", choices=ENGINES, default="d2f")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    problems = problems_of(args.limit)
    rows = {}
    llm = start(ENGINES[args.strategy], "float32")
    for name, case in CASES.items():
        if not name.startswith(args.only):
            continue
        for mode in case.modes:
            measure(llm, problems[:2], case, mode)  # compiles the grammar
            row = measure(llm, problems, case, mode)
            rows[f"{name}, {mode}"] = row
            print(f"{name:32}{mode:12}{row}", flush=True)
    stop_engine(llm)
    named = {"benchmark": "grammar_modes", "strategy": args.strategy}
    print(json.dumps(named | {"rows": rows}))


if __name__ == "__main__":
    main()
