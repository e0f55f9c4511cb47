"""Full CUDA graphs of floating canvases: every captured width, with runs of 0 to f positions.

FlashAttention 3 in bf16 against eager steps, on contexts that nothing splits; Triton in float32
against the plain loop. All requests of a batch have one width, so that their steps are uniform.
"""

import pytest
import test_flash_graphs as flash
import torch
from engines import a_prompt, forwards, generate, params, token_ids
from test_schedules import ENGINES, THRESHOLD, plain

from dllm_plugin.decoding.step_costs import MeasuredCosts

REQUESTS = 8
COUNTS = (1, 3, 8)  # 3 are padded to 4
FULL = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 256],
}
in_process = flash.in_process


@pytest.fixture(autouse=True)
def every_width(monkeypatch):
    """So few requests have a graph for every width, not for the few that load may want."""
    name = "dllm_plugin.config.cuda_graphs.widths_worth"
    monkeypatch.setattr(name, lambda requests, widths, shift: widths)


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs FlashAttention 3, so a Hopper GPU",
)


def start(name, compilation, backend, **options):
    family, strategy, block, canvas, _ = ENGINES[name]
    dllm = {"strategy": strategy, "adaptive": "throughput", "threshold": THRESHOLD}
    least = 1 if family == "dream" else 2
    dllm |= {"block_length": block, "canvas_length": canvas, "min_window": least}
    dllm |= options.pop("dllm", {})
    settings = {"max_model_len": 256} | options
    return flash.engine_of(
        f"tiny-{family}", dllm, compilation, backend=backend, **settings
    )


def noted(engine, monkeypatch):
    """The captured widths, and what is replayed from now on: (requests, width)."""
    core = engine.llm_engine.engine_core.engine_core
    manager = core.model_executor.driver_worker.worker.model_runner.cudagraph_manager
    captured = {(desc.num_reqs, desc.uniform_token_count) for desc in manager.graphs}
    replayed, replay = set(), manager.run_fullgraph

    def note(desc):
        replayed.add((desc.num_reqs, desc.uniform_token_count))
        return replay(desc)

    monkeypatch.setattr(manager, "run_fullgraph", note)
    return captured, replayed


def cases(count):
    return [(a_prompt(9 + 7 * i, i), 20 + i) for i in range(count)]


def answers(engine, widths):
    found = {}
    for width in widths:
        for count in COUNTS:
            wishes = [
                params(tokens, dllm_schedule=[width]) for _, tokens in cases(count)
            ]
            found[width, count] = generate(
                engine, [prompt for prompt, _ in cases(count)], wishes
            )
    return found


def check_replayed(captured, replayed):
    """Every captured width is replayed, for counts that fit and for one that is padded."""
    wanted = {(n, width) for n, width in captured if n in (1, 4, 8)}
    assert len(wanted) >= 9 and replayed >= wanted


def check_costs(engine):
    """The scheduler chooses by what the worker has measured, and kept in a file."""
    core = engine.llm_engine.engine_core.engine_core
    costs = core.scheduler.controller.costs
    assert isinstance(costs, MeasuredCosts) and core.scheduler.clock is not None
    assert 0 < costs.ms[0] <= costs.ms[-1] < 1000 and costs.per_key >= 0
    assert len(costs.ms) == len(costs.positions) > 5 and max(costs.positions) <= 256


@hopper
@pytest.mark.parametrize("cascade", [False, True])
@pytest.mark.parametrize("name", ["llada-d2f", "dream-d2f", "sdar"])
def test_flash_equals_eager_steps(name, cascade, monkeypatch):
    """Both with a cascade from two requests on, or both without."""
    monkeypatch.setattr(
        "dllm_plugin.attention.cascade.MAX_HEADS_PER_KV_HEAD", 9 * cascade
    )
    monkeypatch.setattr("dllm_plugin.attention.cascade.LAUNCH_COST", 60)
    engine = start(name, FULL, "FLASH_ATTN")
    core = engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert bool(runner.model_state.sequences.cascade_from) == cascade
    captured, replayed = noted(engine, monkeypatch)
    widths = sorted({width for _, width in captured})
    found = answers(engine, widths)
    flash.end(engine)
    check_replayed(captured, replayed)
    engine = start(name, flash.EAGER, "FLASH_ATTN")
    eager = answers(engine, widths)
    flash.end(engine)
    for batch, outputs in found.items():
        wanted = [(token_ids(output), forwards(output)) for output in eager[batch]]
        assert [
            (token_ids(output), forwards(output)) for output in outputs
        ] == wanted, batch


@pytest.mark.parametrize("layout", ["unified", "distinct"])
@pytest.mark.parametrize("name", ["llada-d2f", "dream-d2f", "llada2.0"])
def test_triton_equals_the_plain_loop(name, layout, monkeypatch):
    backend = "TRITON_ATTN" if layout == "unified" else None
    dllm = {"kv_cache_layout": layout}
    engine = start(
        name, FULL, backend, dtype="float32", async_scheduling=True, dllm=dllm
    )
    captured, replayed = noted(engine, monkeypatch)
    check_costs(engine)
    found = answers(engine, sorted({width for _, width in captured}))
    flash.end(engine)
    check_replayed(captured, replayed)
    compared = 0
    for (width, count), outputs in found.items():
        for (prompt, tokens), output in zip(cases(count), outputs, strict=True):
            text = plain(name, prompt, tokens, [width])
            if text.margin > 3e-4:
                got = token_ids(output), forwards(output)
                assert got == text.result(), (width, count, len(prompt))
                compared += 1
    assert compared > len(found)
