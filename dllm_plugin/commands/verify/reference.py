"""Choose the second implementation of a checkpoint's forward, and where it runs."""

import gc
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open

from dllm_plugin.commands.verify.own_code import OwnCode, has_code
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.models.checkpoints.lora import adapter_folder
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.sizes import Sizes

ROOM = 1.2  # times the weights, for what a forward computes
FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "tokenizer_config.json",
]


class Reference(NamedTuple):
    """Hold the second implementation and what to call it."""

    model: PlainModel | OwnCode
    name: str
    device: str
    is_mixture: bool


def folder_of(model: str, with_code: bool) -> Path:
    """Return the checkpoint's folder; of a repository of the Hub, a local copy."""
    if Path(model).is_dir():
        return Path(model)
    return Path(snapshot_download(model, allow_patterns=FILES + ["*.py"] * with_code))


def load(
    folder: Path,
    config: DecodeConfig,
    dtype: torch.dtype,
    trusted: bool,
    num_layers: int,
) -> Reference:
    """Load the checkpoint's own code if it may run and there is some, else our plain model."""
    family, own_code = config.family, trusted and has_code(folder)
    is_mixture = "num_experts" in Sizes.load(folder).raw
    # A copy in float32 tells what rounding does to the checkpoint's own code.
    copied = 4 if own_code and dtype.itemsize < 4 else 0
    device = choose_device(folder, dtype.itemsize + copied)
    if own_code:
        if config.lora_path is not None:
            raise ValueError(
                "An adapter is merged into our plain model alone: leave out --trust-remote-code."
            )
        numbers = (family.logits_shift, config.mask_token_id, num_layers)
        own = OwnCode.load(folder, dtype, device, *numbers)
        own.check(config.method.full_attention, config.method.keeps_kv)
        return Reference(own, "the checkpoint's own code", device, is_mixture)
    adapter = None if config.lora_path is None else adapter_folder(config.lora_path)
    plain = PlainModel.load(
        folder, config.mask_token_id, dtype=dtype, device=device, adapter=adapter
    )
    return Reference(plain, f"plain torch for {family.name}", device, is_mixture)


def choose_device(folder: Path, bytes_each: int) -> str:
    """Return the engine's device if the model fits there now, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return "cuda" if ROOM * num_weights(folder) * bytes_each < free else "cpu"


def num_weights(folder: Path) -> int:
    """Count the numbers in all safetensors files."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            total += sum(prod(tensors.get_slice(n).get_shape()) for n in tensors.keys())  # noqa: SIM118
    return total
