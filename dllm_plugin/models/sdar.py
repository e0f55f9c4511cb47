"""Serve SDAR: a Qwen3, dense or with experts, under Qwen3's own weight names."""

from typing import Any

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.weights import Shapes


class SDARForCausalLM(DiffusionModel, Qwen3ForCausalLM):
    """Serve JetLM/SDAR-1.7B, -4B, -8B and checkpoints of their layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen3(config)


class SDARMoeForCausalLM(DiffusionModel, Qwen3MoeForCausalLM):
    """Serve JetLM/SDAR-30B-A3B and checkpoints of its layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen3(config, config.sparse_layers)
