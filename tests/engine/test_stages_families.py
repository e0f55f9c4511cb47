"""Recorded decodes of every family through two stages of a pipeline, and more through four."""

from pathlib import Path
from typing import Any, NamedTuple

import block_cases
import full_goldens
import full_jobs
import made_checkpoints
import pytest
import test_causal_goldens
import test_causal_window
import test_full_goldens
import test_full_memory
import test_golden_traces
import test_grid_goldens
import test_introspective
import test_structure_goldens
from engines import (
    CHECKPOINTS,
    EngineRoom,
    free_pages,
    generate,
    letters,
    num_preemptions,
    params,
    results,
)
from test_adapters import LORA, PROMPTS, request
from test_adapters import tokens as adapted
from trained_adapters import write_adapter

pytestmark = [
    pytest.mark.usefixtures("template", "workers_end_soon"),
    pytest.mark.slow,
]

STAGES = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
}


class Recorded(NamedTuple):
    """Cases of a checkpoint, and the module whose `wish` and `check` they have."""

    checkpoint: str
    dllm: dict[str, Any]
    cases: list[Any]
    module: Any


def recorded(name: str) -> Recorded:
    """The cases that stages serve: by name of a checkpoint, or family and strategy."""
    family, _, strategy = name.partition(" ")
    if family in test_grid_goldens.FILES:
        cases = test_grid_goldens.cases_of(family)
        return Recorded(family, test_grid_goldens.CANVAS, cases, test_grid_goldens)
    if family in block_cases.FILES:
        cases = block_cases.cases_of(family)
        cases = [c for c in cases if not c["settings"].get("use_block_cache")]
        return Recorded(family, block_cases.CANVAS.get(family, {}), cases, block_cases)
    if family == "idlm":
        cases = test_introspective.cases()
        return Recorded(family, {"canvas_length": 32}, cases, test_introspective)
    if family.startswith("wedlm"):
        cases = test_causal_window.cases(family)
        return Recorded(family, {}, cases, test_causal_window)
    assert family == "llada2.2"
    return Recorded(family, {}, test_structure_goldens.cases(), test_structure_goldens)


def check_recorded(name: str, room: EngineRoom, **options: Any) -> None:
    """Every second case: together they give the tokens and the forwards of the reference."""
    checkpoint, dllm, cases, module = recorded(name)
    cases = cases[::2]
    llm = room.start(checkpoint, dllm, **options)
    prompts = [case["prompt_ids"] for case in cases]
    outputs = generate(llm, prompts, [module.wish(case) for case in cases])
    for case, output in zip(cases, outputs, strict=True):
        module.check(case, output)


def check_full(
    family: str, strategy: str, room: EngineRoom, every: int = 2, **options: Any
) -> None:
    """The same under full attention, without guidance; `every` so many cases."""
    cases = []
    for case in full_goldens.cases_of(family, strategy):
        guided = case.record["settings"].get("cfg_scale", 0) > 0
        if not (case.is_random or guided):
            cases.append(case)
    cases = cases[::every]
    llm = test_full_goldens.start(room, (family, strategy), **options)
    wishes = [test_full_goldens.wish_for(case) for case in cases]
    outputs = generate(llm, [case.prompt for case in cases], wishes)
    for case, output in zip(cases, outputs, strict=True):
        test_full_goldens.check(case, output)


@pytest.mark.parametrize(
    "name",
    [
        "sdar-moe",
        "llada2.0",
        "llada2.1",
        "llada2.2",
        "stable-diffcoder",
        "a2d-qwen3",
        "fast-dllm-v2",
        "fast-dllm-v2-tied",
        "idlm",
        "wedlm",
        "wedlm-qwen2",
    ],
)
def test_blocks(name: str, room: EngineRoom) -> None:
    check_recorded(name, room, async_scheduling=True, **STAGES)


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("llada", "dual_cache"),
        ("dream", "prefix_cache"),
        ("llada-moe", "semi_autoregressive"),
        ("rnd1", "semi_autoregressive"),
    ],
)
def test_full_attention(family: str, strategy: str, room: EngineRoom) -> None:
    check_full(family, strategy, room, async_scheduling=True, **STAGES)


def test_d2f(room: EngineRoom) -> None:
    """Several open blocks, whose states only the last stage knows."""
    cases = test_golden_traces.cases_of("dream")
    options = STAGES | {"async_scheduling": True}
    llm = room.start("dream", {"strategy": "d2f"}, **options)
    wishes = [test_golden_traces.wish_for(case) for case in cases]
    outputs = generate(llm, [case["prompt_ids"] for case in cases], wishes)
    for case, output in zip(cases, outputs, strict=True):
        test_golden_traces.check(case, output)


def test_drafts_with_an_adapter(room: EngineRoom) -> None:
    """Each stage adapts its own layers, in rows of drafts only."""
    options, cases = test_causal_goldens.ADAPTED, test_causal_goldens.drafted(True)
    llm = room.start("nemotron", options, True, **STAGES)
    test_causal_goldens.alone_and_together(llm, cases, 3)


def test_without_asynchronous_scheduling(room: EngineRoom) -> None:
    check_recorded("sdar", room, **STAGES)
    check_full("llada", "dual_cache", room, every=3, **STAGES)


def test_preempted_under_full_attention(room: EngineRoom) -> None:
    """Pages for two whole texts; what comes back begins its block again, on both stages."""
    decoder = ("llada", "dual_cache")
    few = {"block_size": 32, "num_gpu_blocks_override": 10}
    options = few | STAGES | {"async_scheduling": True}
    llm = full_jobs.start(room, decoder, canvas=32, **options)
    before, pages = num_preemptions(llm), free_pages(llm)
    jobs = test_full_memory.small_blocks(decoder, 10)
    test_full_memory.check_text(decoder, jobs, full_jobs.run(llm, jobs), canvas=32)
    assert num_preemptions(llm) > before and free_pages(llm) == pages


def test_adapters(room: EngineRoom, tmp_path: Path) -> None:
    """An adapter that requests choose, and one that is merged: each stage has its layers'."""
    checkpoint = CHECKPOINTS / "tiny-sdar"
    adapter = write_adapter(tmp_path / "one", checkpoint, ["q_proj", "up_proj"], 1)
    options: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
        ({}, LORA, [request(adapter)] * len(PROMPTS)),
        ({"lora_path": str(adapter)}, {}, None),
    ]
    for dllm, more, chosen in options:
        wanted = adapted(room.start("sdar", dllm, **more), chosen)
        assert adapted(room.start("sdar", dllm, **more, **STAGES), chosen) == wanted


def layers_of_stages(llm: Any) -> list[int]:
    """Of how many layers each stage has keys."""
    return llm.collective_rpc(lambda worker: len(worker.model_runner.kv_caches))


def test_layers_of_stages(
    room: EngineRoom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer each, and as vLLM's variable divides them."""
    folder = made_checkpoints.make_a2d(tmp_path / "a2d", "Qwen2", num_hidden_layers=4)
    options = {"model": str(folder), "async_scheduling": True}
    prompts = [letters(length, length) for length in (1, 32, 70, 5)]

    def run(**more: Any) -> tuple[Any, list[int]]:
        llm = room.start("a2d-qwen2", test_grid_goldens.CANVAS, **options, **more)
        return results(generate(llm, prompts, params(24))), layers_of_stages(llm)

    wanted, _ = run()
    four = STAGES | {"pipeline_parallel_size": 4}
    assert run(**four) == (wanted, [1, 1, 1, 1])
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    assert run(**STAGES) == (wanted, [3, 1])
