"""SDAR-8B and LLaDA2-mini shapes with dummy weights: full CUDA graphs, asynchronous scheduling."""

import json
import shutil
import time
from pathlib import Path

import pytest

CHECKPOINTS = Path(__file__).parent.parent / "goldens" / "checkpoints"
SHAPES = {
    "sdar": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "llada2.0": {
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "rotary_dim": 64,
        "vocab_size": 157184,
        "max_position_embeddings": 32768,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_many_requests(name, tmp_path):
    from vllm import LLM, SamplingParams

    folder = tmp_path / name
    shutil.copytree(
        CHECKPOINTS / f"tiny-{name}", folder, ignore=lambda *_: ["model.safetensors"]
    )
    config = json.loads((folder / "config.json").read_text()) | SHAPES[name]
    (folder / "config.json").write_text(json.dumps(config))
    engine = LLM(
        str(folder),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
    )
    prompts = [
        {"prompt_token_ids": [1 + (i + j) % 200 for j in range(256 + i)]}
        for i in range(64)
    ]
    wish = SamplingParams(
        max_tokens=96,
        temperature=0,
        ignore_eos=True,
        extra_args={"dllm_policy": "low_confidence"},
    )
    for _ in range(2):
        started = time.perf_counter()
        outputs = engine.generate(prompts, wish, use_tqdm=False)
        print(f"{name}: 64 requests x 96 tokens: {time.perf_counter() - started:.2f} s")
        assert [len(output.outputs[0].token_ids) for output in outputs] == [96] * 64
    engine.llm_engine.engine_core.shutdown()
