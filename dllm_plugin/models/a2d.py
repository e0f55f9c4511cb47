"""Serve A2D: autoregressive models that dLLM trained on, under their own weight names."""

from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.weights import Shapes


class A2DQwen3(DiffusionModel, Qwen3ForCausalLM):
    """Serve dllm-hub/Qwen3-0.6B-diffusion-mdlm, -bd3lm and checkpoints of their layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen3(config)


class A2DQwen2(DiffusionModel, Qwen2ForCausalLM):
    """Serve dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion and checkpoints of its layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen2(config)


class A2DLlama(DiffusionModel, LlamaForCausalLM):
    """Serve checkpoints of the model type a2d-llama."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.llama(config)
