"""Step aside if vLLM registers one of our architectures itself, unless our options are given.

vLLM's own class and config hook then serve the model, and nothing of ours runs. With a ``dllm``
option our class takes its place in every process of the engine: the configuration carries the fact.
"""

from typing import Any

import vllm
from vllm import ModelRegistry
from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger

from dllm_plugin.models import ARCHITECTURES

logger = init_logger("vllm.dllm_plugin")

TAKEN = "dllm_takes_architecture"  # of `additional_config`
ASIDE = (
    "vLLM %s serves %s itself: DiffuPlug steps aside. Give an option in additional_config['dllm'], "
    "such as a strategy, to decode it by DiffuPlug."
)
# Config hooks that were in vLLM's map for classes that were registered before ours; None: no hook.
_hooks: dict[str, Any] = {}


def remember(architecture: str, hook: Any) -> None:
    """Remember vLLM's own hook of an architecture that was registered before ours."""
    if architecture in ModelRegistry.get_supported_archs():
        _hooks[architecture] = hook


def is_builtin(architecture: str) -> bool:
    """Return whether vLLM's registry has a class of its own for one of our architectures."""
    if architecture not in _hooks:
        return False
    model = ModelRegistry.models[architecture].load_model_cls()
    return not model.__module__.startswith("dllm_plugin.")


def check_model(model_config: ModelConfig) -> None:
    """Run vLLM's own hook of a model's config, if there is one."""
    hook = _hooks.get(model_config.architecture)
    if hook is not None and is_builtin(model_config.architecture):
        hook.verify_and_update_model_config(model_config)


def serves(vllm_config: VllmConfig, asked_for_ours: bool) -> bool:
    """Return whether vLLM's class serves a model; log it once, and run vLLM's own hook."""
    architecture = vllm_config.model_config.architecture
    if not is_builtin(architecture):
        return False
    if asked_for_ours:
        _take_over(vllm_config)
        return False
    logger.info_once(ASIDE, vllm.__version__, architecture)
    hook = _hooks[architecture]
    if hook is not None:
        hook.verify_and_update_config(vllm_config)
    return True


def _take_over(vllm_config: VllmConfig) -> None:
    """Register our class in place of vLLM's, here and in every process of this engine."""
    model_config = vllm_config.model_config
    architecture = model_config.architecture
    given: Any = vllm_config.additional_config
    vllm_config.additional_config = {**given, TAKEN: architecture}
    take_over_again(vllm_config)
    # vLLM inspected its own class before it called our hook.
    found = ModelRegistry.inspect_model_cls([architecture], model_config)
    model_config._model_info, model_config._architecture = found


def take_over_again(vllm_config: VllmConfig) -> None:
    """Register our class in another process, if it took the place of vLLM's."""
    given: Any = vllm_config.additional_config
    taken = given.get(TAKEN)
    if taken is not None:
        ModelRegistry.register_model(taken, ARCHITECTURES[taken])
