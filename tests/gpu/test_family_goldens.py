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
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager


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
    "idlm": Decodes("idlm", {"canvas_length": 32}, idlm.cases(), idlm, False),
    "wedlm": Decodes("wedlm", {}, wedlm.cases("wedlm"), wedlm, False),
    "wedlm-qwen2": Decodes("wedlm-qwen2", {}, wedlm.cases("wedlm-qwen2"), wedlm, False),
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
