"""Test what the machine decides: where a step is compiled, and which ranks are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.machine import resolve_for_machine, uncompiled
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
        (
            "Fast_dLLM_QwenForCausalLM",
            {},
            "a forward of their own, as at max_active_blocks 1",
        ),
        ("LLaDAModelLM", {"strategy": "d2f", "max_active_blocks": 1}, None),
        ("NemotronLabsDiffusionModel", {"strategy": "self_speculation"}, None),
        ("NemotronLabsDiffusionModel", {"strategy": "block_diffusion"}, None),
        ("IDLMForCausalLM", {}, None),
        ("WeDLMForCausalLM", {}, None),
    ],
)
def test_what_is_compiled(
    architecture: str, options: dict[str, object], sentence: str | None
) -> None:
    config = resolve(Options.from_user(options), architecture, 512, MASK)
    problem = next(uncompiled(config, eager=False), None)
    assert (
        problem is None
        if sentence is None
        else problem is not None and sentence in problem
    )
    assert next(uncompiled(config, eager=True)) == "needs a GPU and no enforce_eager"


@pytest.mark.parametrize(
    "dllm", [{}, {"adaptive": "throughput"}, {"compile_step": False}], ids=str
)
def test_steps_are_compiled_by_default_on_gpus(
    dllm: dict[str, Any],
    vllm_config_for: Callable[..., Any],
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = vllm_config_for(
        checkpoints / "tiny-sdar", additional_config={"dllm": dict(dllm)}
    )
    config.compilation_config.mode, config.optimization_level = None, 2
    config.model_config.enforce_eager = False
    decode, options = get_decode_config(config), Options.from_user(dllm)
    assert not resolve_for_machine(config, options, decode).compile_step
    monkeypatch.setattr(
        "dllm_plugin.config.machine.current_platform.is_cpu", lambda: False
    )
    compiled = resolve_for_machine(config, options, decode).compile_step
    assert compiled == dllm.get("compile_step", True)


def test_replicas_of_a_mixture_are_refused_on_cpus(
    vllm_config_for: Callable[..., Any], checkpoints: Path
) -> None:
    with pytest.raises(ValueError, match="or data_parallel_size on CPUs"):
        vllm_config_for(checkpoints / "tiny-sdar-moe", data_parallel_size=2)
    vllm_config_for(checkpoints / "tiny-sdar", data_parallel_size=2)
