"""Dream and DiffuCoder: a Qwen2 whose logits row i predicts position i + 1."""

from typing import Any, ClassVar

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.weights import Shapes


class DreamModel(DiffusionModel, Qwen2ForCausalLM):
    """Dream-org/Dream-v0, apple/DiffuCoder-7B and checkpoints of their layout."""

    logits_shift: ClassVar[bool] = True

    @classmethod
    def head_name(cls) -> str:
        return "lm_head.weight"

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        width, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
        kv_width = width // config.num_attention_heads * config.num_key_value_heads
        shapes: Shapes = {
            "model.embed_tokens.weight": (vocab, width),
            "model.norm.weight": (width,),
            cls.head_name(): (vocab, width),
        }
        for layer in range(config.num_hidden_layers):
            block = f"model.layers.{layer}"
            shapes |= {
                f"{block}.input_layernorm.weight": (width,),
                f"{block}.self_attn.q_proj.weight": (width, width),
                f"{block}.self_attn.q_proj.bias": (width,),
                f"{block}.self_attn.k_proj.weight": (kv_width, width),
                f"{block}.self_attn.k_proj.bias": (kv_width,),
                f"{block}.self_attn.v_proj.weight": (kv_width, width),
                f"{block}.self_attn.v_proj.bias": (kv_width,),
                f"{block}.self_attn.o_proj.weight": (width, width),
                f"{block}.post_attention_layernorm.weight": (width,),
                f"{block}.mlp.gate_proj.weight": (inner, width),
                f"{block}.mlp.up_proj.weight": (inner, width),
                f"{block}.mlp.down_proj.weight": (width, inner),
            }
        return shapes
