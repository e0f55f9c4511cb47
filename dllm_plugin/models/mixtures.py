"""Serve mixtures of experts under their parents' weight names: Qwen3-MoE, LLaDA2 (a Ling 2.0).

Of LLaDA2, vLLM's MoE layer rounds the router's logits to the activations' dtype, and in bfloat16
the scores of 256 experts tie. vLLM's decoder layer constructs that MoE layer by name and has no
parameter for another class. So we exchange the class of each MoE layer after construction; other
models in the same process keep vLLM's class.

LLaDA2.2 chooses the experts of a token among few that the positions of its block share. Its MoE
layers are given a router by vLLM's factory, with our function, in place of the router that they
were constructed with.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.router.router_factory import (
    create_fused_moe_router,
)
from vllm.model_executor.layers.quantization.online.base import (
    OnlineQuantizationConfig,
)
from vllm.model_executor.models.bailing_moe import BailingMoE, BailingMoeV2ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from dllm_plugin.decoding.families import LLADA22

from .base import DiffusionModel
from .checkpoints import shapes
from .checkpoints.weights import Shapes

EPSILON = 1e-20  # of the authors' normalisation


class Qwen3MoeDiffusion(DiffusionModel, Qwen3MoeForCausalLM):
    """Serve mixtures of experts under the names of a Qwen3-MoE."""

    has_qk_norm = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        online = vllm_config.quant_config
        if isinstance(online, OnlineQuantizationConfig) and not online.args.targets:
            # vLLM's other mixtures keep their routers out of it.
            online.ignored_layers.append("*.mlp.gate")
        super().__init__(vllm_config=vllm_config, prefix=prefix)


class LLaDA2MoE(BailingMoE):
    """Route tokens by float32 logits up to the choice of experts, as in training."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute the layer: [tokens, hidden] -> [tokens, hidden]."""
        router_logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states=hidden_states, router_logits=router_logits)


class LLaDA22MoE(LLaDA2MoE):
    """Route tokens to experts of the set that their block shares.

    blocks_T  int64, number of each token's block within the forward; all layers read one
    """

    blocks_T: Tensor
    capacity: int

    def share(self, blocks_T: Tensor, capacity: int) -> None:
        """Route by blocks. Raises ValueError if vLLM's kernel has a router of its own."""
        if self.experts.routed_experts.quant_method.is_monolithic:
            raise ValueError(
                "LLaDA2.2 chooses experts by blocks, and the kernel of experts that vLLM "
                "takes here chooses them itself: set moe_backend to 'triton'."
            )
        self.register_buffer("blocks_T", blocks_T, persistent=False)
        self.capacity = capacity
        self.experts.router = create_fused_moe_router(
            top_k=self.top_k,
            global_num_experts=self.num_experts,
            custom_routing_function=self.route,
        )

    def route(
        self,
        hidden_states: Tensor,
        gating_output: Tensor,
        topk: int,
        renormalize: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return share and number of each token's experts, ``[T, topk]``."""
        scores_TE = gating_output.float().sigmoid()
        bias_E: Tensor = self.gate.expert_bias  # type: ignore[assignment]
        ranked_TE = scores_TE + bias_E
        block_T = self.blocks_T[: len(ranked_TE)]
        allowed_TE = allowed_experts(ranked_TE, block_T, self.capacity)
        ranked_TE = ranked_TE.masked_fill(~allowed_TE, float("-inf"))
        chosen_TK = ranked_TE.topk(topk, dim=1).indices
        shares_TK = scores_TE.gather(1, chosen_TK)
        shares_TK = shares_TK / (shares_TK.sum(dim=1, keepdim=True) + EPSILON)
        return shares_TK * self.routed_scaling_factor, chosen_TK


def allowed_experts(ranked_TE: Tensor, block_T: Tensor, capacity: int) -> Tensor:
    """Return the experts of each token's block, bool ``[T, E]``: those of the best ranks."""
    index_TE = block_T[:, None].expand_as(ranked_TE)
    best_TE = torch.full_like(ranked_TE, float("-inf"))
    best_TE = best_TE.scatter_reduce(0, index_TE, ranked_TE, "amax")
    kept = best_TE.topk(capacity, dim=1).indices
    none_TE = torch.zeros_like(ranked_TE, dtype=torch.bool)
    return none_TE.scatter(1, kept, True)[block_T]


def number_blocks(positions_T: Tensor, length: int) -> Tensor:
    """Number the blocks of a forward's tokens, int64 ``[T]``.

    A block ends at a multiple of its length, and where positions do not follow each other: there
    another request begins. Padding has the positions of an earlier step; it never joins a
    request's block, because a request's tokens end at a multiple or at the end of the context.
    """
    follows_T = positions_T == positions_T.roll(1) + 1
    starts_T = ~follows_T | (positions_T % length == 0)
    return starts_T.cumsum(0) - starts_T[:1].to(torch.int64)


class LLaDA2MoeModelLM(DiffusionModel, BailingMoeV2ForCausalLM):
    """Serve inclusionAI/LLaDA2.0-mini, -flash, LLaDA2.1 and checkpoints of their layout."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for mixture in self.mixtures():
            mixture.__class__ = LLaDA2MoE

    def mixtures(self) -> list[Any]:
        """Return the mixtures of experts among this stage's layers."""
        inner = self.model
        found = []
        for layer in inner.layers[inner.start_layer : inner.end_layer]:
            if isinstance(layer.mlp, BailingMoE):
                found.append(layer.mlp)
        return found

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        width, head = config.hidden_size, config.head_dim
        heads = config.num_attention_heads
        every = heads + 2 * config.num_key_value_heads
        shared = config.moe_intermediate_size * config.num_shared_experts
        found: Shapes = {}
        for name, shape in shapes.decoder(config).items():
            if ".self_attn." not in name:
                found[name.replace("embed_tokens", "word_embeddings")] = shape
        for layer in range(config.num_hidden_layers):
            block = f"model.layers.{layer}"
            found |= {
                f"{block}.attention.query_key_value.weight": (every * head, width),
                f"{block}.attention.query_layernorm.weight": (head,),
                f"{block}.attention.key_layernorm.weight": (head,),
                f"{block}.attention.dense.weight": (width, heads * head),
            }
            if layer not in config.sparse_layers:
                continue
            found[f"{block}.mlp.gate.expert_bias"] = (config.num_experts,)
            if shared:
                name = f"{block}.mlp.shared_experts"
                found |= shapes.gated_mlp(name, width, shared)
        return found


class LLaDA22MoeModelLM(LLaDA2MoeModelLM):
    """Serve inclusionAI/LLaDA2.2-mini and -flash, whose blocks share experts."""

    blocks_T: Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        length: int | None = self.config.block_size or LLADA22.block_length
        assert length is not None
        self.routing_block = length
        most = max(
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        self.register_buffer(
            "blocks_T", torch.zeros(most, dtype=torch.int64), persistent=False
        )
        for mixture in self.mixtures():
            mixture.__class__ = LLaDA22MoE
            mixture.share(self.blocks_T, self.config.expert_capacity)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Compute hidden states, after the layers' routers were given the blocks."""
        blocks_T = number_blocks(positions, self.routing_block)
        self.blocks_T[: len(positions)].copy_(blocks_T)
        return super().forward(input_ids, positions, *rest, **named)
