"""The reference decodes on a GPU: fp32, Triton attention, CUDA graphs and eager."""

import json
import random
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parent.parent / "goldens"
RANKING = {"default": "threshold", "neg_entropy": "entropy", "margin_confidence": "topk_margin"}


def sampling_params(case):
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


def expected(case):
    tokens, eos = case["output_ids"], case["eos_id"]
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


@pytest.mark.parametrize("name", ["d2f_llada", "d2f_dream"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_and_forwards_equal_the_reference(name, eager):
    from vllm import LLM

    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    engine = LLM(
        str(GOLDENS / golden["checkpoint"]),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        enforce_eager=eager,
        kv_cache_memory_bytes=64 << 20,
        attention_backend="TRITON_ATTN",
        additional_config={"dllm": {"strategy": "d2f"}},
    )
    cases = golden["cases"]
    shuffled = random.Random(0).sample(cases, len(cases))
    for batch in [*([case] for case in cases), shuffled]:
        prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in batch]
        outputs = engine.generate(prompts, [sampling_params(c) for c in batch], use_tqdm=False)
        for case, output in zip(batch, outputs, strict=True):
            completion = output.outputs[0]
            assert list(completion.token_ids) == expected(case), case["id"]
            forwards = sum(completion.spec_decode_metrics.histogram)
            ends_early = case["eos_id"] in case["output_ids"]
            assert forwards == case["num_forwards"] or (
                ends_early and forwards < case["num_forwards"]
            ), case["id"]
    engine.llm_engine.engine_core.shutdown()
