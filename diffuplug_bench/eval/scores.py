"""Score the bundled model on problems that it was not trained on, decoded in two ways."""

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from diffuplug_bench.word_problems.generator import (
    ANSWER_SCHEMA,
    ask_in_json,
    problems_of,
)
from dllm_plugin import default_model
from dllm_plugin.commands.offline import (
    bundled_options,
    conversation,
    num_forwards,
    start_engine,
    stop_engine,
)

if TYPE_CHECKING:
    from tqdm import tqdm
    from vllm import LLM, RequestOutput

    from dllm_plugin.commands.phases import Screen

LIMIT = 500
MAX_TOKENS = 256


class Asked(Protocol):
    """Describe a question: its text, and whether an answer is right."""

    @property
    def question(self) -> str:
        """Return the question."""

    def is_right(self, text: str) -> bool:
        """Return whether a text answers it."""


class Answers(NamedTuple):
    """Answers of an engine."""

    outputs: "list[RequestOutput]"
    positions: int  # that it computed
    seconds: float


class Score(NamedTuple):
    """Results of one way of decoding."""

    accuracy: float  # share of problems whose final number is right
    tokens_per_forward: float
    positions_per_token: float  # every position that was computed, prompts too
    seconds: float  # for all problems in one batch, without loading the model


QUANTISED = ", quantised"  # ends the names of rows


def ways() -> dict[str, dict[str, Any]]:
    """Return the two ways of decoding that are compared, as ``dllm`` options."""
    return {
        "one token per step": {
            "strategy": "block_diffusion",
            "policy": "low_confidence",
            "commit_alone_from": 1,  # otherwise positions and forwards depend on the device
        },
        "D2F, threshold 0.9": {
            "strategy": "d2f",
            "lora_path": default_model.adapter_path(),
            "threshold": 0.9,
        },
    }


def compare_ways(
    limit: int | None,
    dtype: str,
    verbose: bool,
    in_json: bool = False,
    quantised: dict[str, str] | None = None,
) -> int:
    """Decode `limit` problems in both ways; print a table and one JSON line.

    With `in_json` the questions ask for JSON, and a schema holds the answers to it. With options
    in `quantised` each way is decoded without and with them, and equal answers are counted.
    """
    from dllm_plugin.commands.phases import screen

    problems = problems_of(limit or LIMIT)
    if in_json:
        problems = [ask_in_json(one) for one in problems]
    schema = ANSWER_SCHEMA if in_json else None
    rows: dict[str, dict[str, Any]] = {}
    llm, plain = None, None
    for name, options in _engines(dtype, quantised or {}).items():
        with screen(verbose) as shown:
            if llm is not None:
                stop_engine(llm)
                # The next start takes what is still there out of collections.
                llm = None
            llm = start_in_process(options, shown.log)
            bar = progress_bar(shown, name)
            found = answers(llm, problems, MAX_TOKENS, bar, schema=schema)
        rows[name] = score(found, problems)._asdict()
        if plain is not None and name.endswith(QUANTISED):
            pairs = zip(plain.outputs, found.outputs, strict=True)
            equal = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs]
            rows[name]["equal"] = sum(equal) / len(equal)
        plain = found
    # The last engine ends with the process: to take it apart takes a second more.
    _print_ways(rows)
    record = {
        "benchmark": "eval",
        "problems": len(problems),
        "dtype": dtype,
        "json": in_json,
    }
    print(json.dumps(record | {"quantised": quantised or {}, "rows": rows}))
    return 0


def _engines(dtype: str, quantised: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the options of each engine, by its row; the quantised after the other."""
    engine = dict(quantised)
    head = engine.pop("head_quantization", "none")
    found = {}
    for name, dllm in ways().items():
        found[name] = bundled_options(dllm) | {"dtype": dtype}
        if quantised:
            options = bundled_options(dllm | {"head_quantization": head})
            found[name + QUANTISED] = options | engine | {"dtype": dtype}
    return found


def _print_ways(rows: dict[str, dict[str, Any]]) -> None:
    """Print a line for each way of decoding."""
    width = max(20, *map(len, rows))
    print(
        f"{'':<{width}} {'accuracy':>9} {'tokens/forward':>15} {'positions/token':>16} "
        f"{'seconds':>8}"
    )
    for name, row in rows.items():
        equal = f"  {row['equal']:.1%} as unquantised" if "equal" in row else ""
        print(
            f"{name:<{width}} {row['accuracy']:>8.1%} {row['tokens_per_forward']:>15.2f} "
            f"{row['positions_per_token']:>16.1f} {row['seconds']:>8.1f}{equal}"
        )


def progress_bar(screen: "Screen", name: str) -> "Callable[..., tqdm[Any]] | bool":
    """Return what draws a progress bar for vLLM on a terminal, else False and a line."""
    if not screen.is_terminal:
        screen.end(name)
        return False
    screen.end()
    form = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}"
    return partial(_named_bar, name=name, file=screen.err, bar_format=form, leave=False)


def _named_bar(*args: Any, name: str, **kwargs: Any) -> "tqdm[Any]":
    from tqdm import tqdm

    return tqdm(*args, **kwargs | {"desc": name})


def start(dllm: dict[str, Any], dtype: str, log: Path | None = None) -> "LLM":
    """Start the bundled model in this process, where the scheduler's counter can be read."""
    return start_in_process(bundled_options(dllm) | {"dtype": dtype}, log)


def start_in_process(options: dict[str, Any], log: Path | None = None) -> "LLM":
    """Start an engine in this process, for the same reason."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when the engine is built
    return start_engine(options, log)


def answers(
    llm: "LLM",
    problems: Sequence[Asked],
    max_tokens: int,
    bar: "Callable[..., tqdm[Any]] | bool",
    extra_args: dict[str, Any] | None = None,
    schema: dict[str, Any] | None = None,
) -> Answers:
    """Answer all problems in one batch, held to `schema`; `bar` is vLLM's `use_tqdm`."""
    from vllm import RequestOutput, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    sampling = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            seed=i,  # some policies sample
            extra_args=extra_args,
            structured_outputs=None
            if schema is None
            else StructuredOutputsParams(json=schema),
        )
        for i in range(len(problems))
    ]
    texts = [p.question for p in problems]
    if getattr(llm.get_tokenizer(), "chat_template", None) is None:  # a base model
        llm.enqueue(texts, sampling, use_tqdm=False)
    else:
        llm.enqueue_chat(list(map(conversation, texts)), sampling, use_tqdm=False)

    before, start = _num_positions(llm), time.perf_counter()
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=bar)
    seconds = time.perf_counter() - start
    return Answers(outputs, _num_positions(llm) - before, seconds)


def score(found: Answers, problems: Sequence[Asked]) -> Score:
    """Compute the score; tokens count up to and including the end of the answer."""
    right = tokens = forwards = 0
    for output, item in zip(found.outputs, problems, strict=True):
        right += item.is_right(output.outputs[0].text)
        tokens += len(output.outputs[0].token_ids)
        forwards += num_forwards(output)
    return Score(
        right / len(problems),
        tokens / max(forwards, 1),
        found.positions / max(tokens, 1),
        found.seconds,
    )


def _num_positions(llm: "LLM") -> int:
    """Return the positions computed so far, from the scheduler of an engine in this process."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.scheduler.num_computed_positions
