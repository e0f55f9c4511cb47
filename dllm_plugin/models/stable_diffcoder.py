"""Serve Stable-DiffCoder: a Llama under Llama's own weight names."""

from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.weights import Shapes


class StableDiffCoder(DiffusionModel, LlamaForCausalLM):
    """Serve ByteDance-Seed/Stable-DiffCoder-8B-Base and -Instruct."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.llama(config)
