"""Serve Dream and DiffuCoder: a Qwen2 whose logits at i predict position i + 1.

DreamReasoner shares nothing with them but the name: a Qwen3 that was trained by blocks.
"""

from typing import Any

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.weights import Shapes


class DreamModel(DiffusionModel, Qwen2ForCausalLM):
    """Serve Dream-org/Dream-v0, apple/DiffuCoder-7B and checkpoints of their layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen2(config)


class DreamReasoner(DiffusionModel, Qwen3ForCausalLM):
    """Serve Dream-org/DreamReasoner-8B, -Base and checkpoints of their layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen3(config)
