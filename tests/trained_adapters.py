"""Adapters in PEFT's layout for tiny checkpoints, and the checkpoints with them merged."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dllm_plugin.models.checkpoints import lora

RANK = 4


def write_adapter(
    path: Path, checkpoint: Path, targets: Sequence[str], seed: int = 0, **config: Any
) -> Path:
    """Random matrices for `targets` in every layer, and wherever else the name occurs."""
    path.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        weights |= load_file(file)
    for name, weight in weights.items():
        module = name.rpartition(".")[0]
        if weight.ndim == 2 and module.rpartition(".")[2] in targets:
            rows, columns = weight.shape
            stem = f"base_model.model.{module}.lora_"
            tensors[f"{stem}A.weight"] = 0.1 * torch.randn(
                RANK, columns, generator=generator
            )
            tensors[f"{stem}B.weight"] = 0.1 * torch.randn(
                rows, RANK, generator=generator
            )
    save_file(tensors, path / lora.WEIGHTS_FILE)
    written = {
        "peft_type": "LORA",
        "base_model_name_or_path": checkpoint.name,
        "r": RANK,
        "lora_alpha": 6,
        "target_modules": list(targets),
        "bias": "none",
    }
    (path / lora.CONFIG_FILE).write_text(json.dumps(written | config))
    return path


def merged(path: Path, checkpoint: Path, adapter: Path) -> Path:
    """The checkpoint with the adapter merged, in float32: what is stored rounds no update."""
    shutil.copytree(checkpoint, path)
    file = path / "model.safetensors"
    base = {name: weight.float() for name, weight in load_file(file).items()}
    weights = dict(lora.merge(base.items(), lora.load_adapter(adapter)))
    file.unlink()
    save_file(weights, file, metadata={"format": "pt"})
    return path
