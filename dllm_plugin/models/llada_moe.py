"""Serve LLaDA-MoE: a Qwen3-MoE whose shares of the chosen experts are not normalised."""

from typing import Any

from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.weights import Shapes


class LLaDAMoEModelLM(DiffusionModel, Qwen3MoeForCausalLM):
    """Serve inclusionAI/LLaDA-MoE-7B-A1B-Base, -Instruct and checkpoints of their layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen3(config, config.sparse_layers)
