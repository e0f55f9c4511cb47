"""Serve LLaDA2.0 and 2.1: a Ling 2.0 (BailingMoeV2) under that model's own weight names.

vLLM's MoE layer rounds the router's logits to the activations' dtype, and in bfloat16 the scores of
256 experts tie. vLLM's decoder layer constructs that MoE layer by name and has no parameter for
another class. So we exchange the class of each MoE layer after construction. Nothing of vLLM is
assigned to, and other models in the same process keep vLLM's class.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe import BailingMoE, BailingMoeV2ForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.weights import Shapes


class LLaDA2MoE(BailingMoE):
    """Route tokens by float32 logits up to the choice of experts, as in training."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the layer: [tokens, hidden] -> [tokens, hidden]."""
        router_logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states=hidden_states, router_logits=router_logits)


class LLaDA2MoeModelLM(DiffusionModel, BailingMoeV2ForCausalLM):
    """Serve inclusionAI/LLaDA2.0-mini, -flash, LLaDA2.1 and checkpoints of their layout."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            if isinstance(layer.mlp, BailingMoE):
                layer.mlp.__class__ = LLaDA2MoE

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        width, head = config.hidden_size, config.head_dim
        q_width = head * config.num_attention_heads
        kv_width = head * config.num_key_value_heads
        shared = config.moe_intermediate_size * config.num_shared_experts
        found = shapes.embedding_and_head(config, embedding="model.word_embeddings")
        for layer in range(config.num_hidden_layers):
            block = f"model.layers.{layer}"
            found |= shapes.layer_norms(block, config)
            found |= {
                f"{block}.attention.query_key_value.weight": (
                    q_width + 2 * kv_width,
                    width,
                ),
                f"{block}.attention.query_layernorm.weight": (head,),
                f"{block}.attention.key_layernorm.weight": (head,),
                f"{block}.attention.dense.weight": (width, q_width),
            }
            if layer < config.first_k_dense_replace:
                found |= shapes.gated_mlp(
                    f"{block}.mlp", width, config.intermediate_size
                )
                continue
            found |= shapes.experts(f"{block}.mlp", config)
            found[f"{block}.mlp.gate.expert_bias"] = (config.num_experts,)
            if shared:
                found |= shapes.gated_mlp(f"{block}.mlp.shared_experts", width, shared)
        return found
