"""Tiny A2D checkpoints from the parents that no recorded decode has: Qwen2 and Llama."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

TOKENIZER = Path(__file__).parent / "goldens" / "checkpoints" / "tiny-a2d-qwen3"
MASK = 282
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


def parent_model(parent: str, **config: Any) -> Any:
    """The parent's class of transformers, with random weights."""
    import transformers

    read = getattr(transformers, f"{parent}Config")(**SIZES | config)
    model = getattr(transformers, f"{parent}ForCausalLM")(read).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                size = 0.3 if "embed" in name or "head" in name else 0.12
                weight.normal_(std=size, generator=generator)
        model.lm_head.weight[MASK] *= 0.01  # never the best token
    return model


def make_a2d(folder: Path, parent: str, **config: Any) -> Path:
    """Write a checkpoint as dLLM does: the parent's tensors under another model type.

    Its weights are in several files. `parent`: Qwen2 or Llama; `config`: other keys.
    """
    parent_model(parent, **config).save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    file = folder / "config.json"
    written = json.loads(file.read_text())
    written["model_type"] = f"a2d-{parent.lower()}"
    written["architectures"] = [f"A2D{parent}LMHeadModel"]
    file.write_text(json.dumps(written))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder
