"""Full-attention decodes on a GPU: fp32, Triton attention, CUDA graphs and eager."""

import pytest
import recorded
from engines import a_prompt
from full_goldens import FILES
from full_jobs import CANVAS, CONTEXT, TOO_CLOSE, FullJob, check, random_jobs, run
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager


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
    "to the end, synchronous": (
        {"strategy": "prefix_cache"},
        {"async_scheduling": False},
    ),
}


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(("dllm", "options"), KINDS.values(), ids=KINDS)
def test_blocks_in_full_graphs(family, dllm, options):
    """Blocks of the engine's length, by default 32, have full graphs; others piecewise ones."""
    dllm = {"strategy": "dual_cache", "block_length": 16, "canvas_length": 64} | dllm
    recorded.check_full(family, dllm["strategy"], dllm, **options)


SOME = [
    ("llada", "dual_cache"),
    ("dream", "prefix_cache"),
    ("llada", "semi_autoregressive"),
]


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


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("strategy", ["dual_cache", "prefix_cache"])
@pytest.mark.parametrize("before", [4, None], ids=["near", "answer"])
def test_refreshes_in_full_graphs(family, strategy, before, monkeypatch):
    """Those of the engine's options; two requests at once have the same texts."""
    near = {"full_refresh_every": 8, "suffix_window": 8}
    near |= {} if before is None else {"refresh_before": before}
    replayed, replay = [], ModelCudaGraphManager.run_fullgraph
    monkeypatch.setattr(
        ModelCudaGraphManager,
        "run_fullgraph",
        lambda self, desc: replayed.append(desc) or replay(self, desc),
    )
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    dllm = {"strategy": strategy, "canvas_length": CANVAS, "block_length": 8} | near
    engine = recorded.start(f"checkpoints/tiny-{family}", dllm, max_model_len=CONTEXT)
    wrong, lengths, compared = [], set(), 0
    for trial in range(6):
        numbers = (
            {"steps": 3, "policy": "low_confidence"}
            if trial % 2
            else {"policy": "threshold", "threshold": 0.6}
        )
        job = FullJob(a_prompt(30, trial), CANVAS, numbers)
        text = FullJob(job.prompt, CANVAS, numbers | near | {"block_length": 8}).decode(
            (family, strategy)
        )
        if text.margin <= TOO_CLOSE:
            continue
        compared += 1
        for together in (1, 2):
            replayed.clear()
            for output in run(engine, [job] * together):
                try:
                    check(job, text, output)
                except AssertionError as error:
                    wrong.append(str(error)[:200])
            if together == 1:
                lengths |= {desc.uniform_token_count for desc in replayed}
    engine.llm_engine.engine_core.shutdown()
    assert wrong == [] and compared > 3
    # Blocks, and refreshes with what is before and behind them; the last one has nothing behind.
    if before is not None:
        assert {before + 8, before + 16} <= lengths
    else:
        assert {24, 32, 40, 48} <= lengths
