"""What structured output costs: the bundled model's word problems, free and under grammars.

    python benchmarks/structured_output.py --limit 200

Runs on the machine's own device and prints a table and one JSON line. Every constrained answer is
judged by `re` or `json` before a number is printed.
"""

import argparse
import json
import os
import platform
import re
import time
from typing import Any

from diffuplug_bench.eval.scores import start
from diffuplug_bench.word_problems.generator import (
    ANSWER_SCHEMA,
    ask_in_json,
    extract_answer,
    problems_of,
)
from dllm_plugin import default_model
from dllm_plugin.commands.offline import conversation, num_forwards, stop_engine

OWN_FORM = (
    r"([^\n#{}]+\n){1,6}#### -?[0-9]{1,6}"  # what the model was trained to answer
)
MAX_TOKENS = 160


def eight_schemas() -> list[dict[str, Any]]:
    """Objects of one to eight integers."""
    names = [f"n{i}" for i in range(8)]
    return [
        {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in names[: i + 1]},
            "required": names[: i + 1],
            "additionalProperties": False,
        }
        for i in range(8)
    ]


def from_json(text: str) -> int | None:
    """The answer of a JSON text; raises ValueError if it is none."""
    return int(json.loads(text)["answer"])


def from_own_form(text: str) -> int | None:
    """The answer of a text in the model's own form; raises ValueError if it is none."""
    if re.fullmatch(OWN_FORM, text) is None:
        raise ValueError(text)
    return extract_answer(text)


def measure(
    llm: Any,
    problems: list[Any],
    grammar: dict[str, Any] | None,
    read: Any,
    **options: Any,
) -> Any:
    """Decode all problems in one batch; return a row of the table."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = None if grammar is None else StructuredOutputsParams(**grammar)
    options |= {
        "temperature": 0.0,
        "max_tokens": MAX_TOKENS,
        "structured_outputs": asked,
    }
    params = SamplingParams(**options)
    began = time.perf_counter()
    chats = [conversation(one.question) for one in problems]
    outputs = llm.chat(chats, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    right = valid = tokens = 0
    for one, output in zip(problems, outputs, strict=True):
        tokens += len(output.outputs[0].token_ids)
        try:
            right += read(output.outputs[0].text) == one.result
            valid += 1
        except (ValueError, KeyError, TypeError):  # no JSON, or none of this schema
            continue
    return {
        "accuracy": right / len(problems),
        "valid": valid / len(problems),
        "tokens_per_forward": tokens / sum(map(num_forwards, outputs)),
        "tokens_per_text": tokens / len(problems),
        "seconds": seconds,
    }


def mixed(llm: Any, problems: list[Any], grammars: list[Any]) -> dict[str, float]:
    """Tokens per second of the free half of a batch, beside free text and beside grammars."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    rates = {}
    ways = {"free": [None], "drafts": grammars, "automaton": grammars}
    for name, given in (
        *ways.items(),
        *ways.items(),
    ):  # the first time kernels may be compiled
        engine = llm.llm_engine
        texts = [
            llm.get_tokenizer().apply_chat_template(
                conversation(one.question), add_generation_prompt=True, tokenize=False
            )
            for one in problems
        ]
        for i, text in enumerate(texts):
            grammar = given[i // 2 % len(given)] if i % 2 else None
            asked = None if grammar is None else StructuredOutputsParams(**grammar)
            params = SamplingParams(
                temperature=0.0, max_tokens=64, structured_outputs=asked
            )
            if grammar is not None:
                params.extra_args = {"dllm_grammar": name}
            engine.add_request(str(i), {"prompt": text}, params)
        began, tokens, last = time.perf_counter(), 0, 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished and int(output.request_id) % 2 == 0:
                    tokens += len(output.outputs[0].token_ids)
                    last = time.perf_counter() - began
        rates[f"free tokens/s beside {name}"] = tokens / last
    return rates


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=200, help="number of problems")
    limit = parser.parse_args().limit
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    problems = problems_of(limit)
    dllm = {
        "strategy": "d2f",
        "lora_path": default_model.adapter_path(),
        "threshold": 0.9,
    }
    llm = start(dllm, "float32")
    asked, schema = [ask_in_json(one) for one in problems], {"json": ANSWER_SCHEMA}
    own_form = {"regex": OWN_FORM}
    drafts, automaton = (
        {"extra_args": {"dllm_grammar": way}} for way in ("drafts", "automaton")
    )
    for way in (drafts, automaton):  # compiles the grammars
        measure(llm, problems[:4], schema, from_json, **way)
        measure(llm, problems[:4], own_form, from_own_form, **way)
    rows = {
        "free text": measure(llm, problems, None, extract_answer),
        "its own form, drafts": measure(
            llm, problems, own_form, from_own_form, **drafts
        ),
        "its own form, automaton": measure(
            llm, problems, own_form, from_own_form, **automaton
        ),
        "JSON, no grammar": measure(llm, asked, None, from_json),
        "JSON": measure(llm, asked, schema, from_json, **drafts),
        # Who asks for log-probabilities has every token chosen.
        "JSON, no forced text": measure(
            llm, asked, schema, from_json, logprobs=1, **drafts
        ),
        "JSON, automaton": measure(llm, asked, schema, from_json, **automaton),
        "JSON, not asked for": measure(llm, problems, schema, from_json, **drafts),
        "not asked for, automaton": measure(
            llm, problems, schema, from_json, **automaton
        ),
    }
    small = [{"json": schema} for schema in eight_schemas()]
    for grammar in small:  # compiles them
        for way in (drafts, automaton):
            measure(
                llm, problems[:1], grammar, lambda text: len(json.loads(text)), **way
            )
    beside = mixed(llm, problems[:64], small)
    stop_engine(llm)
    columns = list(rows["JSON"])
    print(f"{'':<26}" + "".join(f"{name:>20}" for name in columns))
    for name, row in rows.items():
        print(f"{name:<26}" + "".join(f"{row[column]:>20.3f}" for column in columns))
    print("\n".join(f"{name}: {value:.1f}" for name, value in beside.items()))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(
        json.dumps(
            {"benchmark": "structured_output", "machine": machine, "rows": rows}
            | beside
        )
    )


if __name__ == "__main__":
    main()
