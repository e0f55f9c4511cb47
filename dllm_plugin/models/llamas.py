"""Serve Llamas and Qwens under the weight names of their parents, and LLaDA.

LLaDA is a Llama under OLMo's weight names, as in GSAI-ML/LLaDA-8B-Instruct's index. Mixtures stand
elsewhere, for vLLM's layers of experts take long to import.
"""

from typing import Any

import regex as re
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from .base import DiffusionModel
from .checkpoints import shapes
from .checkpoints.weights import Shapes

BLOCK = r"^model\.transformer\.blocks\.(\d+)\."
END = r"(?=\.|$)"  # layer lists of quantisation configs name modules without `.weight`
# LLaDA's name -> Llama's: `ff_out` is the down projection in a layer and the LM head outside.
OUTSIDE = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
PATTERNS: dict[Any, str | None] = {}
for ours, theirs in OUTSIDE.items():
    PATTERNS[re.compile(rf"^model\.transformer\.{ours}{END}")] = theirs
for ours, theirs in IN_LAYER.items():
    PATTERNS[re.compile(rf"{BLOCK}{ours}{END}")] = rf"model.layers.\1.{theirs}"
RENAME = WeightsMapper(orig_to_new_regex=PATTERNS)


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
        of_llama = super().checkpoint_shapes(config)
        found: Shapes = {}
        for ours, theirs in OUTSIDE.items():
            found[f"model.transformer.{ours}.weight"] = of_llama[f"{theirs}.weight"]
        for layer in range(config.num_hidden_layers):
            block = f"model.transformer.blocks.{layer}"
            for ours, theirs in IN_LAYER.items():
                shape = of_llama[f"model.layers.{layer}.{theirs}.weight"]
                found[f"{block}.{ours}.weight"] = shape
        return found


class Qwen2Diffusion(DiffusionModel, Qwen2ForCausalLM):
    """Serve checkpoints under the names of a Qwen2."""

    has_bias = True


class Qwen3Diffusion(DiffusionModel, Qwen3ForCausalLM):
    """Serve checkpoints under the names of a Qwen3."""

    has_qk_norm = True


class LlamaDiffusion(DiffusionModel, LlamaForCausalLM):
    """Serve checkpoints under the names of a Llama."""


class BiasedLlamaDiffusion(DiffusionModel, LlamaForCausalLM):
    """Serve WeDLM-7B: a Qwen2.5, but a Llama may have heads of any size."""

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.decoder(config, bias=config.qkv_bias)
