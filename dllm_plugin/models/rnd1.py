"""Serve RND1: a Qwen3-MoE whose logits at i predict position i + 1."""

from typing import Any

from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.weights import Shapes


class RND1LM(DiffusionModel, Qwen3MoeForCausalLM):
    """Serve radicalnumerics/RND1-Base-0910 and checkpoints of its layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen3(config, config.sparse_layers)
