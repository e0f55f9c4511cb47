"""SDAR, LLaDA2, Fast-dLLM v2 on a GPU: fp32, Triton attention, full CUDA graphs, async."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import test_block_goldens
import test_grid_goldens
from test_grid_goldens import CANVAS, GOLDENS

MODELS = [(test_grid_goldens, model) for model in test_grid_goldens.FILES]
MODELS += [(test_block_goldens, model) for model in test_block_goldens.FILES]


@pytest.mark.parametrize(("recorded", "model"), MODELS, ids=[model for _, model in MODELS])
def test_tokens_and_forwards_equal_the_reference(recorded, model):
    from vllm import LLM

    engine = LLM(
        str(GOLDENS / "checkpoints" / f"tiny-{model}"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        attention_backend="TRITON_ATTN",
        additional_config={"dllm": {} if "fast" in model else CANVAS},
    )
    cases = recorded.cases_of(model)
    shuffled = random.Random(0).sample(cases, len(cases))
    for batch in [*([case] for case in cases), shuffled]:
        prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in batch]
        outputs = engine.generate(prompts, [recorded.wish(case) for case in batch], use_tqdm=False)
        for case, output in zip(batch, outputs, strict=True):
            recorded.check(case, output)
    engine.llm_engine.engine_core.shutdown()
