"""Full-attention decodes on a GPU: fp32, Triton attention, CUDA graphs and eager."""

import pytest
import recorded
from full_goldens import FILES
from full_jobs import CANVAS, CONTEXT, check, random_jobs, run


@pytest.mark.parametrize(("family", "strategy"), FILES, ids=str)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_and_forwards_equal_the_reference(family, strategy, eager):
    recorded.check_full(family, strategy, enforce_eager=eager)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("policy", ["threshold", "low_confidence"])
@pytest.mark.parametrize("ahead", [True, False], ids=["asynchronous", "synchronous"])
def test_without_a_cache(family, policy, ahead):
    """Piecewise graphs of up to 1,024 positions, and a step that is compiled for the policy."""
    dllm = {"strategy": "semi_autoregressive", "policy": policy, "canvas_length": 64}
    recorded.check_full(family, dllm["strategy"], dllm, async_scheduling=ahead)


KINDS = {
    "asynchronous": ({}, {}),
    "synchronous": ({}, {"async_scheduling": False}),
    "uncompiled": ({"compile_step": False}, {}),
    "uncompiled, synchronous": ({"compile_step": False}, {"async_scheduling": False}),
    "schedule": ({"policy": "low_confidence"}, {}),
    "to the end of the canvas": ({"strategy": "prefix_cache"}, {}),
    "to the end, synchronous": ({"strategy": "prefix_cache"}, {"async_scheduling": False}),
}


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(("dllm", "options"), KINDS.values(), ids=KINDS)
def test_blocks_in_full_graphs(family, dllm, options):
    """Blocks of the engine's length, by default 32, have full graphs; others piecewise ones."""
    dllm = {"strategy": "dual_cache", "block_length": 16, "canvas_length": 64} | dllm
    recorded.check_full(family, dllm["strategy"], dllm, **options)


SOME = [("llada", "dual_cache"), ("dream", "prefix_cache"), ("llada", "semi_autoregressive")]


@pytest.mark.parametrize("decoder", SOME, ids="-".join)
def test_refreshes_that_cost_less_share_a_batch(decoder):
    """Each request has its own, as the plain loop decodes it; random numbers run on the CPU."""
    family, strategy = decoder
    jobs = [
        (job, text)
        for job, text in random_jobs(decoder, 24, seed=2, approximate=True)
        if job.numbers["policy"] != "random" and "alg_temp" not in job.numbers
    ]
    assert len(jobs) > 8
    dllm = {"strategy": strategy, "canvas_length": CANVAS}
    engine = recorded.start(f"checkpoints/tiny-{family}", dllm, max_model_len=CONTEXT)
    outputs = run(engine, [job for job, _ in jobs])
    engine.llm_engine.engine_core.shutdown()
    for (job, text), output in zip(jobs, outputs, strict=True):
        check(job, text, output)
