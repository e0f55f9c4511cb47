"""On CPUs a class is registered in place of its name, and no process is started to inspect it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from vllm import ModelRegistry

from dllm_plugin.engine.auto_dtype import register_classes
from dllm_plugin.models import ARCHITECTURES

DREAM, NAME = "DreamModel", ARCHITECTURES["DreamModel"].rpartition(":")[2]


@pytest.fixture
def by_name(single_rank: None) -> Iterator[None]:
    """Dream registered as `register` does it, and in the end as it was."""
    before = ModelRegistry.models[DREAM]
    ModelRegistry.register_model(DREAM, ARCHITECTURES[DREAM])
    yield
    ModelRegistry.models[DREAM] = before


def test_no_process_inspects_the_class(
    by_name: None,
    vllm_config_for: Callable[..., Any],
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a process leaves what it found in vLLM's cache."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    vllm_config_for(checkpoints / "tiny-dream")
    assert ModelRegistry.models[DREAM].inspect_model_cls().architecture == NAME
    assert list(tmp_path.rglob("modelinfos/*")) == []


def test_a_class_of_someone_else_stays(by_name: None) -> None:
    class Other(nn.Module):
        """Registered under our name by another plugin."""

    ModelRegistry.register_model(DREAM, Other)
    register_classes([DREAM, "LlamaForCausalLM"])
    assert ModelRegistry.models[DREAM].load_model_cls() is Other
