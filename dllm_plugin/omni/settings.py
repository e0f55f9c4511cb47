"""What the runners share: options, refusals at start, refusals of a request."""

from typing import Any

import torch
from vllm.config import VllmConfig

from dllm_plugin.omni import REFUSED

Runner: Any = object  # base of what stands in front of whichever runner of vLLM


def option(config: VllmConfig, name: str, default: Any = None) -> Any:
    """An entry of ``additional_config["omni"]``."""
    given = config.additional_config
    return given.get("omni", {}).get(name, default) if isinstance(given, dict) else default


def refuse(subject: str, faults: dict[str, Any]) -> None:
    """Raise ValueError with one sentence for the first fault that is present."""
    for fault, present in faults.items():
        if present:
            raise ValueError(f"{subject} cannot be combined with {fault}.")


def check_scheduler(subject: str, config: VllmConfig, wanted: str) -> None:
    """Refuse an engine that has our worker or executor, but not the scheduler of it."""
    found = config.scheduler_config.get_scheduler_cls()
    name = f"{found.__module__}.{found.__qualname__}"
    refuse(subject, {f"scheduler_cls={name!r}; use {wanted!r}": name != wanted})


def refusal(sentence: str) -> torch.Tensor:
    """A request's refusal on its only way back, as its tensor: uint8 ``[bytes]``."""
    return torch.frombuffer(bytearray(REFUSED + sentence.encode()), dtype=torch.uint8)
