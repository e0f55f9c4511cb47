"""Serve models under the weight names of their parents: Qwens, and two Llamas."""

from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.weights import Shapes


class Qwen2Diffusion(DiffusionModel, Qwen2ForCausalLM):
    """Serve Dream, DiffuCoder, Fast-dLLM v2, Open-dCoder and A2D from Qwen2."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.decoder(config, bias=True)


class Qwen3Diffusion(DiffusionModel, Qwen3ForCausalLM):
    """Serve SDAR, I-DLM, WeDLM-8B, DreamReasoner and A2D from Qwen3."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.decoder(config, qk_norm=True)


class Qwen3MoeDiffusion(DiffusionModel, Qwen3MoeForCausalLM):
    """Serve mixtures of experts under the names of a Qwen3-MoE."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.decoder(config, qk_norm=True, sparse_layers=config.sparse_layers)


class LlamaDiffusion(DiffusionModel, LlamaForCausalLM):
    """Serve Stable-DiffCoder, and A2D from Llama."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.decoder(config)


class BiasedLlamaDiffusion(DiffusionModel, LlamaForCausalLM):
    """Serve WeDLM-7B: a Qwen2.5, but a Llama may have heads of any size."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.decoder(config, bias=config.qkv_bias)
