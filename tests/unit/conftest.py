"""One vLLM world for the unit tests that build a model, and the tiny checkpoints."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("surface")
GOLDENS = Path(__file__).parents[1] / "goldens"
CHECKPOINTS = GOLDENS / "checkpoints"

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # unit tests never use the network
# Tiny matrices: a second thread costs more than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws depends on no test before it, which differ with every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Recorded traces of the reference decoders."""
    return GOLDENS


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The tiny checkpoints, one folder for each layout."""
    return CHECKPOINTS


class Messages(logging.Handler):
    """Keeps what is logged as text."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What our code logs, from INFO on. vLLM sets logging up in a process's first engine config,
    which takes handlers off; it is set up before."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())
    logger, handler = logging.getLogger("vllm.dllm_plugin"), Messages()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler.texts
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def registered() -> None:
    """Our configs, tokenizers and classes known; no vLLM started."""
    from dllm_plugin.models import register_configs

    register_configs()


# What configs of tests name besides our architectures.
OF_VLLM = {
    "LlamaForCausalLM": "vllm.model_executor.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "vllm.model_executor.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "vllm.model_executor.models.qwen3:Qwen3ForCausalLM",
    "TransformersForCausalLM": "vllm.model_executor.models.transformers:TransformersForCausalLM",
}


@pytest.fixture(scope="session")
def model_classes(registered: None) -> None:
    """Classes, not names: vLLM inspects a named class in a new process, seconds each."""
    from vllm import ModelRegistry

    import dllm_plugin
    from dllm_plugin.models import ARCHITECTURES

    for architecture, path in (ARCHITECTURES | OF_VLLM).items():
        module, _, name = path.partition(":")
        ModelRegistry.register_model(architecture, getattr(import_module(module), name))
    dllm_plugin.register()


@pytest.fixture(
    scope="module"
)  # not longer: other tests may start engines in this process
def single_rank(
    model_classes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A vLLM world of one CPU rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    store = tmp_path_factory.mktemp("vllm") / "store"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture
def vllm_config_for(single_rank: None) -> Callable[..., Any]:
    """Builds the VllmConfig of a checkpoint directory: fp32, eager."""
    from vllm.engine.arg_utils import EngineArgs

    def build(model: Path, **options: Any) -> Any:
        arguments = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
        } | options
        return EngineArgs(model=str(model), **arguments).create_engine_config()

    return build


@pytest.fixture
def load_model(vllm_config_for: Callable[..., Any]) -> Callable[..., Any]:
    """Builds a checkpoint's model and loads its weights through vLLM's loader."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    def load(model: Path, **options: Any) -> Any:
        config = vllm_config_for(model, **options)
        loader = get_model_loader(config.load_config)
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
        ):
            module = initialize_model(config)
            loader.load_weights(module, config.model_config)
            process_weights_after_loading(
                module, config.model_config, config.device_config.device
            )
        return module.eval()

    return load


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A writable copy of a tiny checkpoint, its config.json changed by keyword."""

    def copy(name: str, **config: Any) -> Path:
        target = tmp_path / name
        shutil.copytree(CHECKPOINTS / name, target)
        file = target / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return target

    return copy
