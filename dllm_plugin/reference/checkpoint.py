"""Read a checkpoint's weights for the plain model, every tensor under Qwen's name.

Nothing is checked: the engine refuses a missing, surplus or misshapen tensor.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from .sizes import LLADA, LLADA2, NEMOTRON, Sizes

COMPUTED = (".rotary_emb.", "rotary_pos_emb.inv_freq")  # buffers that nobody reads
# Parts of names -> parts of Qwen's; for each kind in this order.
LLADA_PARTS = {
    "model.transformer.ff_out": "lm_head",
    "transformer.wte": "embed_tokens",
    "transformer.ln_f": "norm",
    "transformer.blocks": "layers",
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
LLADA2_PARTS = {
    "word_embeddings": "embed_tokens",
    ".attention.": ".self_attn.",
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
    "self_attn.dense": "self_attn.o_proj",
}
NEMOTRON_PARTS = {"encoder.": "model.", "diffusion_head.": "lm_head."}
PARTS = {LLADA: LLADA_PARTS, NEMOTRON: NEMOTRON_PARTS}
PARTS |= dict.fromkeys(LLADA2, LLADA2_PARTS)


def load_weights(
    folder: Path,
    sizes: Sizes,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    adapter: Path | None = None,
) -> dict[str, Tensor]:
    """Read all safetensors files of a folder, and merge an adapter."""
    weights: dict[str, Tensor] = {}
    updates = {} if adapter is None else _updates(adapter)
    for name, tensor in _stored(folder):
        if any(part in name for part in COMPUTED):
            continue
        if name in updates:
            tensor = (tensor.float() + updates.pop(name)).to(tensor.dtype)
        # Experts are chosen in float32 whatever the model computes in.
        exact = sizes.kind in LLADA2 and ".mlp.gate." in name
        tensor = tensor.to(device, torch.float32 if exact else dtype)
        weights |= dict(_under_qwens_names(name, tensor, sizes))
    if updates:
        raise ValueError(f"The adapter's update of '{min(updates)}' found no weight.")
    if sizes.tied:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return weights


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))
        names = set(listed["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_tensor(name)


def _under_qwens_names(
    name: str, tensor: Tensor, sizes: Sizes
) -> Iterator[tuple[str, Tensor]]:
    for theirs, ours in PARTS.get(sizes.kind, {}).items():
        name = name.replace(theirs, ours)
    if "query_key_value" not in name:
        yield name, tensor
        return
    counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    rows = [sizes.head * count for count in counts]
    for part, piece in zip("qkv", tensor.split(rows), strict=True):
        yield name.replace("query_key_value", f"{part}_proj"), piece


def _updates(adapter: Path) -> dict[str, Tensor]:
    """Return what a LoRA adapter in PEFT's layout adds, by names of the base checkpoint."""
    text = (adapter / "adapter_config.json").read_text(encoding="utf-8")
    config = json.loads(text)
    for name in ("use_rslora", "rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise ValueError(
                f"{name} of the adapter is nothing that the plain model computes."
            )
    tensors = load_file(adapter / "adapter_model.safetensors")
    scale, found = config["lora_alpha"] / config["r"], {}
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
            found[f"{module}.weight"] = scale * (b.float() @ a.float())
    return found
