"""Every recorded trace on one engine of a GPU: alone, and all of them in one batch."""

import json
import random
from pathlib import Path

import block_cases
import full_goldens
import test_grid_goldens

GOLDENS = Path(__file__).parents[1] / "goldens"
RANKING = {
    "default": "threshold",
    "neg_entropy": "entropy",
    "margin_confidence": "topk_margin",
}


def settings_of(checkpoint, dllm, **options):
    """Options of an engine in float32, where the reference's tokens are exact."""
    settings = {
        "model": str(GOLDENS / checkpoint),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.05,  # vLLM asks that so much is free, however little it takes
        "attention_backend": "TRITON_ATTN",
        "additional_config": {"dllm": dllm},
    }
    return settings | options


def start(checkpoint, dllm, **options):
    """An engine of :func:`settings_of`."""
    from vllm import LLM

    return LLM(**settings_of(checkpoint, dllm, **options))


def decode(engine, cases, prompt_of, wish_of):
    """Pairs of a case and its output; ends the engine."""
    shuffled, found = random.Random(0).sample(cases, len(cases)), []
    for batch in [*([case] for case in cases), shuffled]:
        prompts = [{"prompt_token_ids": prompt_of(case)} for case in batch]
        outputs = engine.generate(
            prompts, [wish_of(case) for case in batch], use_tqdm=False
        )
        found += zip(batch, outputs, strict=True)
    # Before anything is compared: the tests after one that fails need the GPU.
    engine.llm_engine.engine_core.shutdown()
    return found


def d2f_params(case):
    from vllm import SamplingParams

    settings = case["settings"]
    return SamplingParams(
        max_tokens=settings["max_new_tokens"],
        temperature=0,
        ignore_eos=True,
        stop_token_ids=[case["eos_id"]],
        extra_args={
            "dllm_block_length": settings["block_size"],
            "dllm_threshold": settings["skip_threshold"],
            "dllm_block_add_threshold": settings["block_add_threshold"],
            "dllm_decoded_token_threshold": settings["decoded_token_threshold"],
            "dllm_policy": RANKING[settings.get("sampling_strategy", "default")],
        },
    )


def d2f_tokens(case):
    tokens, eos = case["output_ids"], case["eos_id"]
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def check_d2f(name, dllm=(), **options):
    """Tokens and forwards of D2F on LLaDA or Dream."""
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    engine = start(golden["checkpoint"], {"strategy": "d2f", **dict(dllm)}, **options)
    cases = golden["cases"]
    for case, output in decode(
        engine, cases, lambda case: case["prompt_ids"], d2f_params
    ):
        completion = output.outputs[0]
        assert list(completion.token_ids) == d2f_tokens(case), case["id"]
        forwards = sum(completion.spec_decode_metrics.histogram)
        ends_early = case["eos_id"] in case["output_ids"]
        assert forwards == case["num_forwards"] or (
            ends_early and forwards < case["num_forwards"]
        ), case["id"]


def blocks_of(model):
    """The module that knows the recorded traces of SDAR, LLaDA2 or Fast-dLLM v2."""
    return test_grid_goldens if model in test_grid_goldens.FILES else block_cases


def decode_blocks(model, dllm=(), **options):
    """Pairs of a case and its output."""
    canvas = {} if "fast" in model else test_grid_goldens.CANVAS
    engine = start(f"checkpoints/tiny-{model}", {**canvas, **dict(dllm)}, **options)
    cases = blocks_of(model).cases_of(model)
    return decode(engine, cases, lambda case: case["prompt_ids"], blocks_of(model).wish)


def check_blocks(model, dllm=(), **options):
    """Tokens and denoising forwards of SDAR, LLaDA2, Fast-dLLM v2."""
    for case, output in decode_blocks(model, dllm, **options):
        blocks_of(model).check(case, output)


def full_params(case):
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=case.max_tokens,
        temperature=0,
        ignore_eos=True,
        extra_args=case.arguments(),
    )


def check_full(family, strategy, dllm=(), **options):
    """Tokens and forwards under full attention; recorded random numbers run on the CPU alone."""
    engine = start(
        f"checkpoints/tiny-{family}", {"strategy": strategy, **dict(dllm)}, **options
    )
    stages = options.get("pipeline_parallel_size", 1)
    cases = []
    for case in full_goldens.cases_of(family, strategy):
        # Stages refuse guidance.
        refused = stages > 1 and case.record["settings"].get("cfg_scale", 0) > 0
        if not (case.is_random or refused):
            cases.append(case)
    wrong = []
    for case, output in decode(engine, cases, lambda case: case.prompt, full_params):
        completion = output.outputs[0]
        got = list(completion.token_ids), sum(completion.spec_decode_metrics.histogram)
        if got != (case.output, case.record["num_forwards"]):
            wrong.append(case.name)
    assert wrong == []
