"""Which models are left uncompiled on CPUs, and that a choice of the user's stays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CompilationMode, VllmConfig
from vllm.config.vllm import OptimizationLevel

from dllm_plugin.config.cpu_dtype import EAGER_UP_TO, choose_compilation


@pytest.mark.parametrize(
    ("parameters", "small"),
    [
        (0, True),
        (EAGER_UP_TO, True),
        (EAGER_UP_TO + 1, False),
        (8 * 10**9, False),
        (None, False),
    ],
)
def test_which_models_are_small(parameters: int | None, small: bool) -> None:
    vllm_config = VllmConfig()
    choose_compilation(vllm_config, parameters)
    assert (vllm_config.optimization_level == OptimizationLevel.O0) is small


NONE, TRACED = CompilationMode.NONE, CompilationMode.DYNAMO_TRACE_ONCE


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, NONE),
        ({"enforce_eager": True}, NONE),
        ({"optimization_level": 1}, TRACED),
        ({"optimization_level": 3}, TRACED),
        ({"optimization_level": 0}, NONE),
        ({"compilation_config": {"mode": 3}}, TRACED),
        ({"compilation_config": {"mode": 0}}, NONE),
        ({"compilation_config": {"backend": "eager"}}, TRACED),
    ],
)
def test_small_models_stay_uncompiled_unless_asked(
    vllm_config_for: Callable[..., Any],
    checkpoints: Path,
    options: dict[str, Any],
    mode: Any,
) -> None:
    given = {"enforce_eager": False} | options
    assert (
        vllm_config_for(checkpoints / "tiny-llada", **given).compilation_config.mode
        == mode
    )


def test_a_model_of_unknown_size_is_compiled(
    vllm_config_for: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    model = checkpoint("tiny-llada")
    for path in model.glob("*.safetensors"):
        path.unlink()
    config = vllm_config_for(model, enforce_eager=False, load_format="dummy")
    assert config.compilation_config.mode == TRACED
