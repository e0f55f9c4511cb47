"""Resolve options and requests for tests, and return what is said of wrong ones."""

from typing import Any

import pytest

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import Options
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.config.resolution import resolve

LLADA, DREAM, MASK = "LLaDAModelLM", "DreamModel", 15


def resolved(
    architecture: str = LLADA, max_model_len: int = 1024, **options: Any
) -> DecodeConfig:
    return resolve(Options.from_user(options), architecture, max_model_len, MASK)


def refusal(**options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        Options.from_user(options)
    return one_sentence(caught.value)


def request_refusal(config: DecodeConfig, **arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:
        request_arguments(config, arguments)
    return one_sentence(caught.value)


def one_sentence(error: Exception) -> str:
    message = str(error)
    assert "\n" not in message and message.endswith(".") and len(message) < 850
    return message
