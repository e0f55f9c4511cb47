"""The `distinct` KV layout: recorded decodes of every family, page pressure, prefix caching."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import test_full_goldens as full
import test_golden_traces as d2f
import test_grid_goldens as grid
from engines import CHECKPOINTS, EngineRoom, free_pages, generate, num_preemptions
from full_goldens import cases_of
from jobs import MIXED, check, job
from test_grid_prefix import SHARED, a_prompt, answers, hits

pytestmark = pytest.mark.slow

DISTINCT = {"kv_cache_layout": "distinct"}


def backends(llm: Any) -> set[str]:
    """Attention backends of the served model's layers."""
    layers = (
        llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    )
    return {layer.get_attn_backend().__name__ for layer in layers}


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_d2f_under_page_pressure(family: str, room: EngineRoom) -> None:
    """Prompt and canvas in one engine, blocks that wait, several commits, preemption."""
    llm = room.start(
        family,
        {"strategy": "d2f"} | DISTINCT,
        async_scheduling=True,
        block_size=32,
        num_gpu_blocks_override=14,
    )
    assert backends(llm) == {"DistinctBackend"}
    before, pages = num_preemptions(llm), free_pages(llm)
    cases = d2f.cases_of(family)[::2]
    random.Random(0).shuffle(cases)
    outputs = generate(
        llm, [c["prompt_ids"] for c in cases], [d2f.wish_for(c) for c in cases]
    )
    for case, output in zip(cases, outputs, strict=True):
        d2f.check(case, output)
    check(llm, family, [*MIXED, job(50, 100, 16, seed=8), job(55, 100, 16, seed=9)])
    assert num_preemptions(llm) > before
    assert free_pages(llm) == pages


def test_keys_kept_after_the_span(room: EngineRoom) -> None:
    """Dual cache: a step computes one block and sees the rest of the canvas in the cache."""
    dllm = {"strategy": "dual_cache", "canvas_length": full.CANVAS} | DISTINCT
    llm = room.start("dream", dllm)
    cases = [case for case in cases_of("dream", "dual_cache") if not case.is_random]
    outputs = generate(
        llm, [c.prompt for c in cases], [full.wish_for(c) for c in cases]
    )
    for case, output in zip(cases, outputs, strict=True):
        full.check(case, output)


def test_absolute_grid_and_prefix_caching(room: EngineRoom) -> None:
    """Pages that hits bring in were stored by other requests, or by preempted ones."""
    llm = room.start(
        "sdar", grid.CANVAS | DISTINCT, async_scheduling=True, block_size=32
    )
    assert llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    cases = random.Random(1).sample(grid.cases_of("sdar"), len(grid.cases_of("sdar")))
    for _ in range(2):
        outputs = generate(
            llm, [c["prompt_ids"] for c in cases], [grid.wish(c) for c in cases]
        )
        for case, output in zip(cases, outputs, strict=True):
            grid.check(case, output)
    prompts = [SHARED + a_prompt(1 + i % 13, i) for i in range(6)]
    cold = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        cold += answers(llm, [prompt])
    before = hits(llm)
    assert answers(llm, prompts) == cold
    assert hits(llm) - before >= 5 * 128


def test_the_next_engine_has_its_own_layout(room: EngineRoom) -> None:
    """What vLLM's registry was told for one model does not reach another."""
    llm = room.start("llada")
    assert backends(llm) == {"CPUAttentionBackend"}
    check(llm, "llada", MIXED[:2])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"block_size": 40},
            "needs pages of 16 tokens or a multiple, got block_size 40",
        ),
        ({"kv_cache_dtype": "fp8"}, "but kv_cache_dtype is fp8"),
        (
            {"attention_backend": "TRITON_ATTN"},
            "attention_backend TRITON_ATTN is asked for",
        ),
    ],
    ids=str,
)
def test_refused(settings: dict[str, Any], sentence: str, room: EngineRoom) -> None:
    with pytest.raises(ValueError, match="kv_cache_layout 'distinct'") as caught:
        room.start("llada", {"strategy": "d2f"} | DISTINCT, **settings)
    assert sentence in str(caught.value) and "use kv_cache_layout 'unified'" in str(
        caught.value
    )


def test_head_size_refused(tmp_path: Path, room: EngineRoom) -> None:
    folder = Path(shutil.copytree(CHECKPOINTS / "tiny-llada", tmp_path / "narrow"))
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"n_heads": 8, "n_kv_heads": 8})
    )
    with pytest.raises(
        ValueError, match="supports heads of 32, 64, 128, but this model's have 16"
    ):
        room.start("llada", {"strategy": "d2f"} | DISTINCT, model=str(folder))
