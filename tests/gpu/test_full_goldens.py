"""Full-attention decodes on a GPU: fp32, Triton attention, CUDA graphs and eager."""

import pytest
import recorded
from full_goldens import FILES


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
    "schedule": ({"policy": "low_confidence"}, {}),
    "to the end of the canvas": ({"strategy": "prefix_cache"}, {}),
}


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(("dllm", "options"), KINDS.values(), ids=KINDS)
def test_blocks_in_full_graphs(family, dllm, options):
    """Blocks of the engine's length, by default 32, have full graphs; others piecewise ones."""
    dllm = {"strategy": "dual_cache", "block_length": 16, "canvas_length": 64} | dllm
    recorded.check_full(family, dllm["strategy"], dllm, **options)
