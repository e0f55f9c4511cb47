"""Nemotron, I-DLM, WeDLM, LLaDA2.2 and A2D's mdlm on a GPU: fp32, Triton, CUDA graphs, async."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import recorded
import test_a2d
import test_causal_goldens as nemotron
import test_causal_window as wedlm
import test_introspective as idlm
import test_structure_goldens as llada22
from engines import generate, params, scheduler, token_ids
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from dllm_plugin.decoding.step_costs import Costs


@dataclass
class Decodes:
    """Cases of a checkpoint under one engine, and the module that knows them."""

    model: str
    dllm: dict[str, Any]
    cases: list[dict[str, Any]]
    known: Any  # has `wish` and `check`
    full_graphs: bool = True
    context: int = 256


def check_nemotron(case: dict[str, Any], output: Any) -> None:
    nemotron.check(None, [case], [output])


DECODES = {
    "a2d-mdlm": Decodes("a2d-qwen3", {}, test_a2d.cases(), test_a2d, False, 512),
    "nemotron-blocks": Decodes(
        "nemotron",
        nemotron.BLOCKS,
        nemotron.cases_of("nemotron_generate") + nemotron.cases_of("nemotron_ar"),
        nemotron,
    ),
    "nemotron-drafts": Decodes(
        "nemotron",
        nemotron.DRAFTS,
        nemotron.drafted(False) + nemotron.cases_of("nemotron_ar"),
        nemotron,
    ),
    "nemotron-adapter": Decodes(
        "nemotron", nemotron.ADAPTED, nemotron.drafted(True), nemotron
    ),
    "idlm": Decodes("idlm", {"canvas_length": 32}, idlm.cases(), idlm),
    "wedlm": Decodes("wedlm", {}, wedlm.cases("wedlm"), wedlm),
    "wedlm-qwen2": Decodes("wedlm-qwen2", {}, wedlm.cases("wedlm-qwen2"), wedlm),
    "llada2.2": Decodes("llada2.2", {}, llada22.cases(), llada22),
}


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Full graphs that the engine of a test replays, by their positions of each request."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    counts: Counter[int] = Counter()
    replay = ModelCudaGraphManager.run_fullgraph

    def count(self: Any, desc: Any) -> Any:
        counts[desc.uniform_token_count] += 1
        return replay(self, desc)

    monkeypatch.setattr(ModelCudaGraphManager, "run_fullgraph", count)
    yield counts
    from vllm import envs

    envs.disable_envs_cache()


@pytest.mark.parametrize("name", DECODES)
def test_tokens_and_forwards_equal_the_reference(
    name: str, replayed: Counter[int]
) -> None:
    one = DECODES[name]
    engine = recorded.start(
        f"checkpoints/tiny-{one.model}", one.dllm, max_model_len=one.context
    )
    found = recorded.decode(
        engine, one.cases, lambda case: case["prompt_ids"], one.known.wish
    )
    check = check_nemotron if one.known is nemotron else one.known.check
    wrong = []
    for case, output in found:
        try:
            check(case, output)
        except AssertionError:
            wrong.append(case["id"])
    assert wrong == []
    assert replayed or not one.full_graphs


@pytest.mark.parametrize("name", ["nemotron-drafts", "idlm"])
def test_lengths_of_drafts_change_no_text(name: str, replayed: Counter[int]) -> None:
    """In full graphs of several lengths, by costs under which long drafts pay, or none."""
    one = DECODES[name]
    engine = recorded.start(
        f"checkpoints/tiny-{one.model}", one.dllm, max_model_len=one.context
    )
    prompts = [case["prompt_ids"] for case in one.cases[:8]]
    causal = generate(engine, prompts, params(64, dllm_block_length=1))
    found = []
    for costs in (Costs(), Costs(free=0, per_position=1.0)):
        scheduler(engine).controller.costs = costs
        found.append(generate(engine, prompts, params(64)))
    engine.llm_engine.engine_core.shutdown()
    for outputs in found:
        assert list(map(token_ids, outputs)) == list(map(token_ids, causal))
    assert len(replayed) > 1 and replayed[1]
