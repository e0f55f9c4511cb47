"""``diffuplug eval``: the bundled model's two numbers on problems that it was not trained on."""

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from dllm_plugin import default_model
from dllm_plugin.default_model.problems import Problem, eval_seeds, extract_answer, problem
from dllm_plugin.offline import bundled_options, conversation, num_forwards, start_engine

if TYPE_CHECKING:
    from vllm import RequestOutput

MAX_TOKENS = 256


class Score(NamedTuple):
    """What one way of decoding reached."""

    accuracy: float  # share of problems whose final number is right
    tokens_per_forward: float
    seconds: float  # all problems, batched, without loading


def ways() -> dict[str, dict[str, Any]]:
    """The two ways of decoding that are compared, as ``dllm`` options."""
    return {
        "one token per step": {"strategy": "block_diffusion", "policy": "low_confidence"},
        "D2F, threshold 0.9": {
            "strategy": "d2f",
            "lora_path": default_model.adapter_path(),
            "threshold": 0.9,
        },
    }


def run(limit: int, dtype: str) -> int:
    """Decode `limit` problems in both ways, print a table and one JSON line."""
    problems = [problem(seed) for seed in eval_seeds(limit)]
    scores = {name: _evaluate(name, dllm, dtype, problems) for name, dllm in ways().items()}
    print(f"{'':<20} {'accuracy':>9} {'tokens/forward':>15} {'seconds':>8}")
    for name, score in scores.items():
        print(
            f"{name:<20} {score.accuracy:>8.1%} {score.tokens_per_forward:>15.2f} "
            f"{score.seconds:>8.1f}"
        )
    rows = {name: score._asdict() for name, score in scores.items()}
    print(json.dumps({"benchmark": "eval", "problems": limit, "dtype": dtype, "rows": rows}))
    return 0


def _evaluate(name: str, dllm: dict[str, Any], dtype: str, problems: list[Problem]) -> Score:
    from tqdm import tqdm
    from vllm import RequestOutput, SamplingParams

    llm = start_engine(bundled_options(dllm) | {"dtype": dtype})
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    questions = [conversation(item.question) for item in problems]
    llm.enqueue_chat(questions, sampling, use_tqdm=False)

    def progress(*args: Any, **kwargs: Any) -> "tqdm[Any]":
        return tqdm(*args, **kwargs | {"desc": name})

    start = time.perf_counter()
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=progress)
    seconds = time.perf_counter() - start
    llm.llm_engine.engine_core.shutdown()  # the next engine needs its memory and threads
    return _score(outputs, problems, seconds)


def _score(outputs: "list[RequestOutput]", problems: list[Problem], seconds: float) -> Score:
    right = sum(
        extract_answer(output.outputs[0].text) == item.result
        for output, item in zip(outputs, problems, strict=True)
    )
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    forwards = sum(num_forwards(output) for output in outputs)
    return Score(right / len(problems), tokens / max(forwards, 1), seconds)
