"""The correctness gate: the bundled model through the engine against its plain loop.

Same kind of devices, strategy, canvas, block length, graphs and scheduling as what is measured, in
float32, where both must agree on every token, so with an attention that takes it. The loop
recomputes everything in every step, on the CPU.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dllm_plugin import default_model
from dllm_plugin.commands.bench.drive import Ask, Run, serve
from dllm_plugin.commands.bench.engines import describe, stop
from dllm_plugin.commands.bench.options import Settings
from dllm_plugin.commands.offline import bundled_options, start_engine
from dllm_plugin.decoding.strategy_names import D2F

PROBLEMS = 4
ALONE = PROBLEMS - 1  # so many at once are fed one block each, until answers end, and fewer are not
BLOCKS = 2
CONTEXT = 512
MOST_THREADS = 8


class Verdict(NamedTuple):
    """Whether the engine may be timed; `record` is for the JSON line."""

    green: bool
    sentence: str
    record: dict[str, Any]


def check(settings: Settings, canvas: int, reference: Path | None = None) -> Verdict:
    """Decode `PROBLEMS` problems in both ways and compare all tokens.

    Args:
        reference: folder of the weights that the plain loop reads; default: the engine's.
    """
    expected, prompts, stops = _plain(settings, canvas, reference or Path(default_model.path()))
    length = len(expected[0])
    expected = [_until_stop(row, stops) for row in expected]
    runs, chosen = _engine(settings, canvas, prompts, length)
    got = [answer.token_ids for run in runs for answer in run.answers]
    wrong = [i for i, row in enumerate(got) if row != expected[i % PROBLEMS]]
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
        "positions_per_forward": [_fed(run) for run in runs],
        "engine": chosen,
    }
    sentence = (
        f"{len(wrong)} of {len(got)} answers of the bundled model differ from its plain loop "
        f"(strategy {settings.strategy}, canvas {canvas}): nothing is measured."
        if wrong
        else f"{record['tokens']} tokens of {len(got)} answers equal the plain loop's."
    )
    return Verdict(not wrong, sentence, record)


def ranks_of(settings: Settings) -> int:
    """As many ranks as share the bundled model's heads evenly: 2 of 4, since it has 6."""
    from dllm_plugin.commands.bench.reference_model import Shape

    heads = Shape.load(Path(default_model.path())).n_heads
    return math.gcd(settings.tensor_parallel_size, heads)


def _fed(run: Run) -> float:
    """Canvas positions of a request and forward, on average."""
    forwards = sum(answer.forwards for answer in run.answers)
    return sum(answer.canvas_positions for answer in run.answers) / forwards


def _compilation(settings: Settings) -> dict[str, Any]:
    """vLLM's compilation config without numbers of tokens, which are those of larger batches."""
    sizes = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    kept = {k: v for k, v in (settings.compilation_config or {}).items() if k not in sizes}
    if kept.get("compile_sizes"):
        kept["compile_sizes"] = [size for size in kept["compile_sizes"] if isinstance(size, str)]
    return kept


def _until_stop(tokens: Sequence[int], stops: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens) - 1)
    return list(tokens[: end + 1])


def _plain(
    settings: Settings, canvas_length: int, folder: Path
) -> tuple[list[list[int]], list[list[int]], set[int]]:
    """Token rows of the plain loop, the prompts, and the tokens that end an answer."""
    import torch
    from tokenizers import Tokenizer

    from dllm_plugin.commands.bench import reference_decoding as decoding
    from dllm_plugin.commands.bench.reference_model import Shape, load_weights
    from dllm_plugin.commands.bench.reference_tokenizer import EOT, chat_prompt, token_id
    from dllm_plugin.commands.problems import eval_seeds, problem

    is_d2f = settings.strategy == D2F
    weights = load_weights(folder, Path(default_model.adapter_path()) if is_d2f else None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    problems = [problem(seed) for seed in eval_seeds(PROBLEMS)]
    block = settings.block(canvas_length)
    length = max(BLOCKS * block, 64)
    length = -(-length // block) * block
    canvas = decoding.make_canvas(weights, Shape.load(folder), tokenizer, problems, length, block)
    loop = decoding.d2f if is_d2f else decoding.block_diffusion
    threads = torch.get_num_threads()
    # Products of a tiny model: on 64 cores most of the time would go to waiting for one another.
    torch.set_num_threads(min(threads, MOST_THREADS))
    try:
        with torch.no_grad():
            tokens_BC, _ = loop(canvas)
    finally:
        torch.set_num_threads(threads)
    prompts = [tokenizer.encode(chat_prompt(p.question)).ids for p in problems]
    return tokens_BC.tolist(), prompts, {canvas.eos, token_id(tokenizer, EOT)}


def _engine(
    settings: Settings, canvas: int, prompts: list[list[int]], length: int
) -> tuple[list[Run], dict[str, Any]]:
    """All requests at once, and the engine's choices.

    Where many may be fed one block each, first two at a time, which are fed whole canvases.
    """
    block = settings.block(canvas)
    dllm: dict[str, Any] = {
        "strategy": settings.strategy,
        "canvas_length": canvas,
        "block_length": block,
        **settings.switches,
    }
    ranks = ranks_of(settings)
    if ranks == 1:
        dllm.pop("vocab_parallel", None)
    at_once = [PROBLEMS]
    if settings.feeds_ahead(canvas) and settings.commit_alone_from != 0:
        dllm["commit_alone_from"] = ALONE
        at_once = [ALONE - 1, PROBLEMS]
    if settings.strategy == D2F:
        dllm |= {"lora_path": default_model.adapter_path(), "threshold": 0.9}
    else:
        dllm |= {"policy": "low_confidence"}
    context = max(CONTEXT, 2 * canvas + 8, max(map(len, prompts)) + length + canvas)
    # Triton's default for float32 products is tf32, whose error flips near ties.
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
            "disable_log_stats": False,
            "compilation_config": _compilation(settings),
        }
    )
    chosen = describe(llm)
    runs = [serve(llm, [Ask(p, {"max_tokens": length}) for p in prompts], n) for n in at_once]
    stop(llm)
    if not is_given:
        del os.environ["TRITON_F32_DEFAULT"]  # what is measured runs as it would without a gate
    return runs, chosen
