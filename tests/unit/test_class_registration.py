"""On CPUs a class is registered in place of its name, and no process is started to inspect it."""

import gc
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.mistral import MistralForCausalLM

import dllm_plugin
from dllm_plugin.engine import builtin_models
from dllm_plugin.engine.auto_dtype import register_classes
from dllm_plugin.engine.config_hook import DiffusionVllmConfig
from dllm_plugin.engine.metrics import DenoisingMetrics
from dllm_plugin.models import ARCHITECTURES

DREAM, NAME = "DreamModel", ARCHITECTURES["DreamModel"].rpartition(":")[2]


@pytest.mark.parametrize("below", [True, False])
def test_processes_below_a_command_collect_rarely(
    below: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start, for vLLM is what they import first."""
    monkeypatch.delenv(dllm_plugin.COMMAND, raising=False)
    if below:
        monkeypatch.setenv(dllm_plugin.COMMAND, "1")
    code = "import dllm_plugin, gc; print(gc.get_threshold()[0] == dllm_plugin.RARELY)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.stdout.decode().strip() == str(below), done.stderr


def test_a_registered_process_collects_as_usual() -> None:
    """It walks nothing of what it has imported."""
    gc.set_threshold(dllm_plugin.RARELY)
    try:
        dllm_plugin.register()
        assert gc.get_threshold() == dllm_plugin.USUALLY and gc.get_freeze_count()
    finally:
        gc.set_threshold(*dllm_plugin.USUALLY)
        gc.unfreeze()


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


NEMOTRON = "NemotronLabsDiffusionModel"


class TheirHook(VerifyAndUpdateConfig):
    """A config hook of vLLM's own class."""

    called: Counter[str] = Counter()

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        TheirHook.called["model"] += 1

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        TheirHook.called["engine"] += 1


@pytest.fixture
def builtin(single_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM with a class of its own for Nemotron, registered before ours."""
    before = ModelRegistry.models[NEMOTRON]
    monkeypatch.setitem(MODELS_CONFIG_MAP, NEMOTRON, TheirHook)
    ModelRegistry.register_model(NEMOTRON, MistralForCausalLM)
    TheirHook.called.clear()
    dllm_plugin.register()
    yield
    ModelRegistry.models[NEMOTRON] = before
    builtin_models._hooks.pop(NEMOTRON)


def test_ours_steps_aside_for_a_class_of_vllm(
    builtin: None,
    vllm_config_for: Callable[..., Any],
    checkpoints: Path,
    logged: list[str],
) -> None:
    for _ in range(2):
        config = vllm_config_for(checkpoints / "tiny-nemotron")
    assert type(config) is VllmConfig and config.scheduler_config.scheduler_cls is None
    assert ModelRegistry.models[NEMOTRON].load_model_cls() is MistralForCausalLM
    assert TheirHook.called == {"model": 2, "engine": 2}
    assert sum("DiffuPlug steps aside" in line for line in logged) == 1
    assert not DenoisingMetrics(config).enabled


def test_an_option_of_ours_takes_the_class_over(
    builtin: None, vllm_config_for: Callable[..., Any], checkpoints: Path
) -> None:
    """In this process, and in another one to which the configuration is sent."""
    options = {"dllm": {"strategy": "self_speculation"}}
    config = vllm_config_for(checkpoints / "tiny-nemotron", additional_config=options)
    assert type(config) is DiffusionVllmConfig and not TheirHook.called["engine"]
    assert config.model_config.architecture == NEMOTRON
    sent = pickle.dumps(config)
    ours = ModelRegistry.models[NEMOTRON].load_model_cls()
    assert ours.__module__ == "dllm_plugin.models.nemotron"
    ModelRegistry.register_model(NEMOTRON, MistralForCausalLM)
    assert type(pickle.loads(sent)) is DiffusionVllmConfig
    assert ModelRegistry.models[NEMOTRON].load_model_cls() is ours
