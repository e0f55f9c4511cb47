"""vLLM's warm-up of GPUs, run on the CPU: no step of it leaves the context.

It decodes canvases at positions that a scheduler would not choose. On a GPU a position outside of
the context ends the start of an engine, or reads and writes memory that is not the request's.
"""

from typing import Any

import pytest
from engines import EngineRoom
from vllm import SamplingParams
from vllm.v1.worker.gpu.warmup import warmup_kernels

from dllm_plugin.config.cuda_graphs import warm_up_context

CONTEXT = 256
CANVAS = (CONTEXT - warm_up_context(0)) // 2  # the longest that a GPU takes
FULL = {"canvas_length": CANVAS, "block_length": CANVAS}
HASTY = {"threshold": 0.0}  # a step decides its block, so the next one begins behind it
NEAR = {"block_length": 16, "full_refresh_every": 4, "refresh_before": 0}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "llada, no cache": ("llada", {"strategy": "semi_autoregressive", **FULL}),
    "dream, no cache": ("dream", {"strategy": "semi_autoregressive", **FULL}),
    "no cache, hasty": ("llada", {"strategy": "semi_autoregressive", **FULL, **HASTY}),
    "llada, dual cache": ("llada", {"strategy": "dual_cache", **FULL}),
    "dream, prefix cache": ("dream", {"strategy": "prefix_cache", **FULL}),
    "dual cache, hasty": ("llada", {"strategy": "dual_cache", **FULL, **HASTY}),
    "partial refreshes": (
        "llada",
        {"strategy": "dual_cache", "canvas_length": CANVAS, **NEAR, **HASTY},
    ),
    "d2f": ("llada", {"strategy": "d2f", "canvas_length": CANVAS, "block_length": 16}),
    "d2f, hasty": (
        "dream",
        {"strategy": "d2f", "canvas_length": CANVAS, "block_length": 16} | HASTY,
    ),
    "sdar": ("sdar", {"canvas_length": CANVAS}),
    "sdar, hasty": ("sdar", {"canvas_length": CANVAS, "max_active_blocks": 8} | HASTY),
}


@pytest.mark.parametrize(("family", "dllm"), ENGINES.values(), ids=ENGINES)
def test_every_position_is_inside_the_context(
    family: str, dllm: dict[str, Any], room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = room.start(family, dllm, max_model_len=CONTEXT)
    params = SamplingParams.for_sampler_warmup()
    params.prompt_logprobs = None  # a Triton kernel, and refused in requests
    monkeypatch.setattr(
        SamplingParams, "for_sampler_warmup", staticmethod(lambda: params)
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner, seen = worker.model_runner, []

    def execute(step: Any) -> Any:
        result = worker.execute_model(step)
        if runner.execute_model_state is not None:
            positions = runner.execute_model_state.input_batch.positions
            seen.append((int(positions.min()), int(positions.max())))
        return result

    # Without its bitmask of a grammar, which a Triton kernel applies.
    warmup_kernels(runner, execute, lambda _: worker.sample_tokens(None))
    assert len(seen) == 6
    assert all(low >= 0 and high < CONTEXT for low, high in seen), seen
