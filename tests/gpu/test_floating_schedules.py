"""Floating canvases on a GPU: every schedule against the plain loop, in float32."""

import pytest
import recorded
from engines import generate, params
from test_schedules import ENGINES, THRESHOLD, check, requests

HOW = {
    "full": {},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "eager": {"enforce_eager": True},
    "compiled": {"dllm": {"compile_step": True}},
    "distinct": {"dllm": {"kv_cache_layout": "distinct"}, "attention_backend": None},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ENGINES)
def test_schedules_equal_the_plain_loop(name, how):
    """All at once, each with widths of its own: runs of 0 to f positions, and empty sequences."""
    family, strategy, block, canvas, _ = ENGINES[name]
    options = dict(HOW[how])
    dllm = {"strategy": strategy, "adaptive": "throughput", "threshold": THRESHOLD}
    dllm |= {"block_length": block, "canvas_length": canvas} | options.pop("dllm", {})
    engine, wanted = (
        recorded.start(f"checkpoints/tiny-{family}", dllm, **options),
        requests(name),
    )
    wishes = [params(tokens, dllm_schedule=widths) for _, tokens, widths in wanted]
    outputs = generate(engine, [prompt for prompt, *_ in wanted], wishes)
    engine.llm_engine.engine_core.shutdown()
    assert check(name, outputs, wanted) >= 4
