"""Where a step is compiled, and what is said where it cannot be."""

import pytest

from dllm_plugin.config.machine import uncompiled
from dllm_plugin.config.options import Options
from dllm_plugin.config.resolution import resolve

MASK = 300


@pytest.mark.parametrize(
    ("architecture", "options", "sentence"),
    [
        ("LLaDAModelLM", {"strategy": "d2f"}, None),
        ("DreamModel", {"strategy": "block_diffusion"}, None),
        ("SDARForCausalLM", {}, None),
        ("Fast_dLLM_QwenForCausalLM", {"max_active_blocks": 2}, None),
        ("LLaDAModelLM", {"strategy": "dual_cache"}, None),
        ("DreamModel", {"strategy": "semi_autoregressive"}, None),
        ("Fast_dLLM_QwenForCausalLM", {}, "a forward of their own, as at max_active_blocks 1"),
        ("LLaDAModelLM", {"strategy": "d2f", "max_active_blocks": 1}, None),
    ],
)
def test_what_is_compiled(
    architecture: str, options: dict[str, object], sentence: str | None
) -> None:
    config = resolve(Options.from_user(options), architecture, 512, MASK)
    problem = next(uncompiled(config, cannot=False), None)
    assert problem is None if sentence is None else problem is not None and sentence in problem
    assert next(uncompiled(config, cannot=True)) == "needs a GPU and no enforce_eager"
