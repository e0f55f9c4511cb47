"""Initialise weights, and write base checkpoint and adapter in the layouts of published ones."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from diffuplug_bench.word_problems.chat_prompts import BOS, EOS, EOT, MASK, token_id
from training.model import (
    ADAPTED,
    PREFIX,
    Shape,
    Weights,
    adapter_names,
    linear_names,
)

NAME = "diffuplug/default-model"
MAX_LENGTH = 1024


def initial_weights(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Create float32 weights: scaled normal matrices, damped residual outputs, unit norms."""

    def normal(out: int, inner: int, std: float) -> Tensor:
        return torch.randn(out, inner, generator=generator) * std

    d = shape.d_model
    weights = {
        "wte.weight": normal(shape.vocab_size, d, 0.02),
        "ff_out.weight": normal(shape.vocab_size, d, 0.02),
        "ln_f.weight": torch.ones(d),
    }
    for name, (out, inner) in linear_names(shape).items():
        residual = name.split(".")[2] in ("attn_out", "ff_out")
        damping = math.sqrt(2 * shape.n_layers) if residual else 1.0
        weights[name] = normal(out, inner, 0.7 / math.sqrt(inner) / damping)
    for i in range(shape.n_layers):
        weights[f"blocks.{i}.attn_norm.weight"] = torch.ones(d)
        weights[f"blocks.{i}.ff_norm.weight"] = torch.ones(d)
    return {PREFIX + name: weight for name, weight in weights.items()}


def initial_adapter(
    weights: Weights, rank: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Create LoRA pairs of the attention matrices: A random, B zero, which change nothing yet."""
    adapter = {}
    for name, weight in weights.items():
        if name.split(".")[-2] in ADAPTED:
            out, inner = weight.shape
            a, b = adapter_names(name)
            adapter[a] = torch.randn(rank, inner, generator=generator) / math.sqrt(
                inner
            )
            adapter[b] = torch.zeros(out, rank)
    return adapter


def llada_config(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json with LLaDA's (OLMo style) keys."""
    eos = token_id(tokenizer, EOS)
    return {
        "_name_or_path": NAME,
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "bos_token_id": token_id(tokenizer, BOS),
        "d_model": shape.d_model,
        "embedding_dropout": 0.0,
        "embedding_size": shape.vocab_size,
        "eos_token_id": eos,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": token_id(tokenizer, MASK),
        "max_sequence_length": MAX_LENGTH,
        "mlp_hidden_size": shape.mlp_hidden_size,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": shape.n_heads,
        "n_kv_heads": shape.n_heads,
        "n_layers": shape.n_layers,
        "pad_token_id": eos,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": shape.rope_theta,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "vocab_size": shape.vocab_size,
        "weight_tying": False,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: Weights) -> None:
    stored = {
        n: t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in tensors.items()
    }
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that only their owner may read


def save_base(
    folder: Path, weights: Weights, shape: Shape, tokenizer: Tokenizer
) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16)."""
    config = llada_config(shape, tokenizer)
    eos = [config["eos_token_id"], token_id(tokenizer, EOT)]
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": config["pad_token_id"],
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_tensors(folder / "model.safetensors", weights)


def save_adapter(folder: Path, adapter: Weights, rank: int, alpha: int) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as PEFT lays them out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": NAME,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(ADAPTED),
        "task_type": "CAUSAL_LM",
    }
    _write_json(folder / "adapter_config.json", config)
    _write_tensors(folder / "adapter_model.safetensors", adapter)
