"""The `distinct` KV layout on a GPU: recorded decodes, fp32, full CUDA graphs and eager."""

import json
import random
import sys
from pathlib import Path

import pytest
import test_goldens as d2f

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import full_goldens
import test_grid_goldens as grid
from test_full_goldens import check as check_full
from test_full_goldens import wish_for as full_wish

DISTINCT = {"kv_cache_layout": "distinct"}


def engine_of(checkpoint, dllm, **options):
    from vllm import LLM

    settings = dict(max_model_len=512, max_num_seqs=16, kv_cache_memory_bytes=64 << 20) | options
    return LLM(str(checkpoint), dtype="float32", additional_config={"dllm": dllm}, **settings)


def run(engine, prompts, wishes):
    """Each alone, then all in one batch, shuffled: yields index and output."""
    order = random.Random(0).sample(range(len(prompts)), len(prompts))
    for batch in [*([i] for i in range(len(prompts))), order]:
        inputs = [{"prompt_token_ids": prompts[i]} for i in batch]
        outputs = engine.generate(inputs, [wishes[i] for i in batch], use_tqdm=False)
        yield from zip(batch, outputs, strict=True)
    engine.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("d2f_llada", {}),
        ("d2f_dream", {}),
        ("d2f_dream", {"enforce_eager": True}),
        ("d2f_dream", {"block_size": 16}),
        ("d2f_dream", {"block_size": 256}),
    ],
    ids=str,
)
def test_d2f(name, options):
    golden = json.loads((d2f.GOLDENS / f"{name}.json").read_text())
    engine = engine_of(
        d2f.GOLDENS / golden["checkpoint"], {"strategy": "d2f"} | DISTINCT, **options
    )
    cases = golden["cases"]
    prompts, wishes = [c["prompt_ids"] for c in cases], [d2f.sampling_params(c) for c in cases]
    for i, output in run(engine, prompts, wishes):
        completion, case = output.outputs[0], cases[i]
        assert list(completion.token_ids) == d2f.expected(case), case["id"]
        forwards = sum(completion.spec_decode_metrics.histogram)
        ends_early = case["eos_id"] in case["output_ids"] and forwards < case["num_forwards"]
        assert ends_early or forwards == case["num_forwards"], case["id"]


@pytest.mark.parametrize("model", grid.FILES)
def test_absolute_grid(model):
    checkpoint = grid.GOLDENS / "checkpoints" / f"tiny-{model}"
    engine = engine_of(checkpoint, grid.CANVAS | DISTINCT)
    cases = grid.cases_of(model)
    prompts, wishes = [c["prompt_ids"] for c in cases], [grid.wish(c) for c in cases]
    for i, output in run(engine, prompts, wishes):
        grid.check(cases[i], output)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_keys_kept_behind_the_span(family):
    """Dual cache, piecewise graphs."""
    dllm = {"strategy": "dual_cache", "canvas_length": full_goldens.CANVAS} | DISTINCT
    engine = engine_of(full_goldens.GOLDENS / "checkpoints" / f"tiny-{family}", dllm)
    cases = [c for c in full_goldens.cases_of(family, "dual_cache") if not c.is_random]
    for i, output in run(engine, [c.prompt for c in cases], [full_wish(c) for c in cases]):
        check_full(cases[i], output)
