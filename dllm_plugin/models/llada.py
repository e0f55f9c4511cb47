"""Serve LLaDA: a Llama under OLMo's weight names, as in GSAI-ML/LLaDA-8B-Instruct's index."""

from typing import Any

import regex as re
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints.weights import Shapes

BLOCK = r"^model\.transformer\.blocks\.(\d+)\."
END = r"(?=\.|$)"  # layer lists of quantisation configs name modules without `.weight`

# Anchored patterns: `ff_out` is the down projection inside a layer and the LM head outside.
RENAME = WeightsMapper(
    orig_to_new_regex={
        re.compile(rf"^model\.transformer\.wte{END}"): "model.embed_tokens",
        re.compile(rf"^model\.transformer\.ln_f{END}"): "model.norm",
        re.compile(rf"^model\.transformer\.ff_out{END}"): "lm_head",
        re.compile(rf"{BLOCK}attn_norm{END}"): r"model.layers.\1.input_layernorm",
        re.compile(rf"{BLOCK}([qkv]_proj){END}"): r"model.layers.\1.self_attn.\2",
        re.compile(rf"{BLOCK}attn_out{END}"): r"model.layers.\1.self_attn.o_proj",
        re.compile(
            rf"{BLOCK}ff_norm{END}"
        ): r"model.layers.\1.post_attention_layernorm",
        re.compile(rf"{BLOCK}ff_proj{END}"): r"model.layers.\1.mlp.gate_proj",
        re.compile(rf"{BLOCK}up_proj{END}"): r"model.layers.\1.mlp.up_proj",
        re.compile(rf"{BLOCK}ff_out{END}"): r"model.layers.\1.mlp.down_proj",
    }
)


class LLaDAModelLM(DiffusionModel, LlamaForCausalLM):
    """Serve GSAI-ML/LLaDA-8B and checkpoints of its layout."""

    rename = RENAME
    # For LoRA and quantisation.
    hf_to_vllm_mapper = RENAME | LlamaForCausalLM.hf_to_vllm_mapper

    @classmethod
    def head_name(cls) -> str:
        return "model.transformer.ff_out.weight"

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        width = config.hidden_size
        inner = config.intermediate_size
        vocab = config.vocab_size
        kv_width = width // config.num_attention_heads * config.num_key_value_heads
        shapes: Shapes = {
            "model.transformer.wte.weight": (vocab, width),
            "model.transformer.ln_f.weight": (width,),
            cls.head_name(): (vocab, width),
        }
        for layer in range(config.num_hidden_layers):
            block = f"model.transformer.blocks.{layer}"
            shapes |= {
                f"{block}.attn_norm.weight": (width,),
                f"{block}.q_proj.weight": (width, width),
                f"{block}.k_proj.weight": (kv_width, width),
                f"{block}.v_proj.weight": (kv_width, width),
                f"{block}.attn_out.weight": (width, width),
                f"{block}.ff_norm.weight": (width,),
                f"{block}.ff_proj.weight": (inner, width),
                f"{block}.up_proj.weight": (inner, width),
                f"{block}.ff_out.weight": (width, inner),
            }
        return shapes
