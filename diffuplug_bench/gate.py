"""Check that the engine decodes correctly before it is measured.

The engine decodes the bundled model with the device, strategy, canvas, block length, graphs and
scheduling of the measurement, but in float32 and so with an attention backend that takes float32.
The reference implementation is a plain loop on the CPU (`dllm_plugin.reference`). Both must
agree on every token. If another precision is measured, a second engine answers problems in it.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diffuplug_bench.engines import describe, precision
from diffuplug_bench.problems import problem_prompts, score
from diffuplug_bench.request_loop import Ask, Run, asking_for, serve
from diffuplug_bench.settings import BLOCK_DIFFUSION, Settings, refreshes_of
from diffuplug_bench.word_problems.generator import problems_of
from dllm_plugin import default_model
from dllm_plugin.commands.offline import bundled_options, start_engine, stop_engine
from dllm_plugin.config.cuda_graphs import warm_up_context

if TYPE_CHECKING:
    from dllm_plugin.reference.rules import Rules

PROBLEMS = 4
# Requests at once from which a step computes one block of each.
SINGLE_BLOCK_FROM = PROBLEMS - 1
BLOCKS = 2
LEAST_TOKENS = 64
CONTEXT = 512
RIGHT, ASKED = 19, 20  # problems, in the precision that is measured


class Verdict(NamedTuple):
    """Say whether the engine may be measured; `record` goes into the JSON line."""

    green: bool
    sentence: str
    record: dict[str, Any]


def check(settings: Settings, canvas: int, reference: Path | None = None) -> Verdict:
    """Decode `PROBLEMS` problems with engine and reference, and compare all tokens.

    Args:
        reference: folder of the weights that the reference reads; default: the engine's.
    """
    expected, prompts = _decode_reference(
        settings, canvas, reference or Path(default_model.path())
    )
    runs, chosen = _decode_engine(
        settings, canvas, prompts, answer_length(settings, canvas)
    )
    got = [answer.token_ids for run in runs for answer in run.answers]
    per_variant = len(got) // len(settings.variants)  # several runs of each, perhaps
    wrong = [
        i
        for i, row in enumerate(got)
        if row != expected[i // per_variant * PROBLEMS + i % PROBLEMS]
    ]
    record = {
        "model": "bundled",
        "dtype": "float32",
        "strategy": settings.strategy,
        "canvas": canvas,
        "block_length": settings.block(canvas),
        "tensor_parallel_size": ranks_of(settings),
        "requests": len(got),
        "tokens": sum(map(len, got)),
        "requests_that_differ": len(wrong),
        "positions_per_forward": [_positions_per_forward(run) for run in runs],
        "engine": chosen,
    }
    sentence = (
        f"{len(wrong)} of {len(got)} answers of the bundled model differ from its plain loop "
        f"(strategy {settings.strategy}, canvas {canvas}): nothing is measured."
        if wrong
        else f"{record['tokens']} tokens of {len(got)} answers equal the plain loop's."
    )
    return Verdict(not wrong, sentence, record)


def check_quantised(settings: Settings) -> Verdict:
    """Answer `ASKED` problems of the bundled model in the measured precision, eagerly."""
    problems = problems_of(ASKED)
    dllm = {"strategy": BLOCK_DIFFUSION} | settings.given("head_quantization")
    options = bundled_options(dllm) | {
        "dtype": settings.dtype,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    llm = start_engine(options | precision(settings))
    tokenizer = llm.get_tokenizer()
    asks = []
    for prompt in problem_prompts(tokenizer, problems):
        asks.append(Ask(prompt, {"max_tokens": CONTEXT // 2}))
    run, chosen = serve(llm, asks, ASKED), describe(llm)
    stop_engine(llm)
    answers = [answer.token_ids for answer in run.answers]
    accuracy = score(tokenizer, answers, problems, is_bundled=True)["accuracy"]
    right = round(accuracy * ASKED)
    sentence = f"{right} of {ASKED} answers of the bundled model are right, quantised."
    if right < RIGHT:
        sentence += " Nothing is measured."
    record = {"model": "bundled", "right": right, "asked": ASKED, "engine": chosen}
    return Verdict(right >= RIGHT, sentence, record)


def answer_length(settings: Settings, canvas: int) -> int:
    """Return the most tokens of an answer: at least two blocks, and 64 tokens."""
    block = settings.block(canvas)
    return -(-max(BLOCKS * block, LEAST_TOKENS) // block) * block


def ranks_of(settings: Settings) -> int:
    """Return how many ranks can share the bundled model's 6 heads evenly: for 4 asked, 2."""
    from dllm_plugin.reference.sizes import Sizes

    heads = Sizes.load(Path(default_model.path())).heads
    return math.gcd(settings.tensor_parallel_size, heads)


def _positions_per_forward(run: Run) -> float:
    """Return the mean number of canvas positions per request and forward."""
    forwards = sum(answer.forwards for answer in run.answers)
    return sum(answer.canvas_positions for answer in run.answers) / forwards


def _compilation(settings: Settings) -> dict[str, Any]:
    """Return vLLM's compilation config without sizes, which are those of larger batches."""
    sizes = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    kept = {
        k: v for k, v in (settings.compilation_config or {}).items() if k not in sizes
    }
    if kept.get("compile_sizes"):
        kept["compile_sizes"] = [
            size for size in kept["compile_sizes"] if isinstance(size, str)
        ]
    return kept


def _decode_reference(
    settings: Settings, canvas: int, folder: Path
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the plain loop's answers, each up to its stop token, and the prompts.

    The answers of each variant follow those of the variant before it.
    """
    import torch

    from diffuplug_bench.word_problems.chat_prompts import prompts_of, read_tokenizer
    from dllm_plugin.reference.loops import decode
    from dllm_plugin.reference.model import PlainModel
    from dllm_plugin.reference.text import Text

    tokenizer, stops = read_tokenizer(folder)
    prompts = prompts_of(tokenizer, problems_of(PROBLEMS))
    adapter = Path(default_model.adapter_path())
    model = PlainModel.load(
        folder, adapter=adapter if settings.measured.by_confidence else None
    )
    length, answers = answer_length(settings, canvas), []
    threads = torch.get_num_threads()
    # The GEMMs are tiny: several threads would mostly wait for each other.
    torch.set_num_threads(1)
    try:
        for variant in settings.variants:
            rules = _rules(settings, canvas, variant)
            for prompt in prompts:
                text = Text(model, prompt, length, rules, stops)
                answers.append(decode(text).tokens)
    finally:
        torch.set_num_threads(threads)
    return answers, prompts


def _rules(settings: Settings, canvas: int, variant: str | None) -> "Rules":
    """Return the options of the plain loop."""
    from dllm_plugin.reference.rules import Rules

    by_confidence = settings.measured.by_confidence
    return Rules(
        settings.strategy,
        "threshold" if by_confidence else "low_confidence",
        settings.block(canvas),
        canvas,
        **settings.refreshes | refreshes_of(variant),
    )


def _decode_engine(
    settings: Settings, canvas: int, prompts: list[list[int]], length: int
) -> tuple[list[Run], dict[str, Any]]:
    """Decode all requests at once; return the runs and the engine's choices.

    If the engine may compute one block of each request, it first decodes fewer at a time, whose
    steps compute whole canvases.
    """
    block = settings.block(canvas)
    dllm: dict[str, Any] = {
        "strategy": settings.strategy,
        "canvas_length": canvas,
        "block_length": block,
        **settings.refreshes,
        **settings.switches,
    }
    ranks = ranks_of(settings)
    if ranks == 1:
        dllm.pop("vocab_parallel", None)
    at_once = [PROBLEMS]
    if settings.computes_next_block(canvas) and settings.commit_alone_from != 0:
        dllm["commit_alone_from"] = SINGLE_BLOCK_FROM
        at_once = [SINGLE_BLOCK_FROM - 1, PROBLEMS]
    if settings.measured.by_confidence:
        dllm |= {"lora_path": default_model.adapter_path(), "threshold": 0.9}
    else:
        dllm |= {"policy": "low_confidence"}
    context = max(
        CONTEXT, warm_up_context(canvas), max(map(len, prompts)) + length + canvas
    )
    # Triton's default for float32 GEMMs is tf32, whose rounding changes tokens at near ties.
    is_given = "TRITON_F32_DEFAULT" in os.environ
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    llm = start_engine(
        bundled_options(dllm)
        | {
            "dtype": "float32",
            "max_num_seqs": PROBLEMS,
            "max_model_len": context,
            "enforce_eager": settings.enforce_eager,
            "tensor_parallel_size": ranks,
            "pipeline_parallel_size": settings.pipeline_parallel_size,
            "disable_log_stats": False,
            "compilation_config": _compilation(settings),
        }
    )
    chosen = describe(llm)
    runs = [
        serve(
            llm,
            [asking_for(Ask(p, {"max_tokens": length}), variant) for p in prompts],
            n,
        )
        for variant in settings.variants
        for n in at_once
    ]
    stop_engine(llm)
    if not is_given:
        # The measurement runs as it would without a gate.
        del os.environ["TRITON_F32_DEFAULT"]
    return runs, chosen
