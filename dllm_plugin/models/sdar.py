"""Serve SDAR, I-DLM and WeDLM: Qwen3s, and a Qwen2.5, under their own weight names."""

from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM
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


class IDLMForCausalLM(SDARForCausalLM):
    """Serve yifanyu/I-DLM-8B, -32B: SDAR's tensors, trained to attend causally."""


class SDARMoeForCausalLM(DiffusionModel, Qwen3MoeForCausalLM):
    """Serve JetLM/SDAR-30B-A3B and checkpoints of its layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen3(config, config.sparse_layers)


class WeDLMForCausalLM(DiffusionModel, Qwen3ForCausalLM):
    """Serve tencent/WeDLM-8B-Base, -Instruct and checkpoints of their layout."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen3(config)


class WeDLMBiasedForCausalLM(DiffusionModel, LlamaForCausalLM):
    """Serve tencent/WeDLM-7B-Base, -Instruct; a Llama may have heads of any size."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.dense(config, config.head_dim, bias=config.qkv_bias)
