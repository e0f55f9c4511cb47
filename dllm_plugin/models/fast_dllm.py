"""Serve Fast-dLLM v2: a Qwen2 whose logits at i predict position i + 1; 1.5B ties embeddings."""

from typing import Any

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.weights import Shapes


class FastDLLMQwenForCausalLM(DiffusionModel, Qwen2ForCausalLM):
    """Serve Efficient-Large-Model/Fast_dLLM_v2_7B, _1.5B and checkpoints of their layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen2(config)
