"""Write tiny checkpoints quantised, in formats that vLLM runs on CPUs as well."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LARGEST = {"int": 127.0, "float": 448.0}
HEAD = {"tiny-llada": "model.transformer.ff_out", "tiny-nemotron": "diffusion_head"}
SKIPPED = (
    *("model.transformer.ff_out", "model.transformer.wte"),
    *("lm_head", "model.embed_tokens", "model.word_embeddings"),
    *("diffusion_head", "encoder.embed_tokens"),
)
MIXTURES = (
    *("tiny-sdar-moe", "tiny-llada-moe", "tiny-rnd1"),
    *("tiny-llada2.0", "tiny-llada2.1", "tiny-llada2.2"),
)
ROUTER = ".mlp.gate"

# vLLM's int8 kernel for CPUs with AMX takes no float32; those of other CPUs are exact with it.
DTYPE = torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def quantise(
    path: Path, name: str, kind: str, drop: str = "", experts: bool = False
) -> Path:
    """Rewrite a checkpoint as llm-compressor does: per-channel weights, per-token activations.

    Those of experts only if asked for: vLLM has no kernel for them on CPUs.
    """
    plain = ".*mlp.*" if name in MIXTURES and not experts else rf".*{ROUTER}$"
    file = path / "model.safetensors"
    tensors = {}
    for key, weight in load_file(file).items():
        module = key.removesuffix(".weight")
        left_out = module in SKIPPED or re.match(plain, module)
        if weight.ndim == 2 and not left_out:
            largest = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-6)
            scale = largest / LARGEST[kind]
            scaled = weight.float() / scale
            integer = kind == "int"
            stored = (
                scaled.round().to(torch.int8)
                if integer
                else scaled.to(torch.float8_e4m3fn)
            )
            tensors |= {key: stored, f"{module}.weight_scale": scale}
        else:
            tensors[key] = weight.clone()
    tensors.pop(drop, None)
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    shared = {"num_bits": 8, "type": kind, "symmetric": True}
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": [HEAD.get(name, "lm_head"), f"re:{plain}"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": shared | {"strategy": "channel", "dynamic": False},
                "input_activations": shared | {"strategy": "token", "dynamic": True},
            }
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


# Experts of 32 or 64 numbers inside get 128 or 256: blocks have 128, and vLLM misreads experts
# of one group.
REPEATED = 4


def widen(path: Path) -> Path:
    """Rewrite a mixture to compute the same, with each number inside its experts four times."""
    tensors = load_file(path / "model.safetensors")
    for key, weight in tensors.items():
        if ".experts." in key or ".shared_experts." in key:
            inner = 1 if "down_proj" in key else 0
            weight = weight.repeat_interleave(REPEATED, dim=inner)
            tensors[key] = weight / REPEATED if inner else weight
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    for key in ("moe_intermediate_size", "expert_intermediate_size"):
        if key in config:
            config[key] *= REPEATED
    (path / "config.json").write_text(json.dumps(config))
    return path


FORMATS = ("pack-quantized", "gptq", "awq")  # of four bits
GROUP = 32  # inputs that share a scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the numbers in a word


def stays(module: str) -> bool:
    """Return whether a checkpoint of four bits leaves a module as it is."""
    return module in SKIPPED or module.endswith(ROUTER)


def pack(path: Path, name: str, form: str) -> Path:
    """Rewrite a checkpoint with weights of four bits, a scale per `GROUP` of inputs."""
    file = path / "model.safetensors"
    tensors = {}
    for key, weight in load_file(file).items():
        module = key.removesuffix(".weight")
        if weight.ndim == 2 and not stays(module):
            for suffix, value in packed(weight.float(), form).items():
                tensors[f"{module}.{suffix}"] = value.contiguous()
        else:
            tensors[key] = weight.clone()
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    head = HEAD.get(name, "lm_head")
    config["quantization_config"] = {
        "gptq": {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
        "awq": {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        "pack-quantized": {
            "format": form,
            "quantization_status": "compressed",
            "ignore": [head, rf"re:.*{ROUTER}$"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": GROUP,
                        "dynamic": False,
                    },
                    "input_activations": None,
                }
            },
        },
    }[form] | {"quant_method": form if form != FORMATS[0] else "compressed-tensors"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def packed(weight_NK: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a matrix, whose numbers from -8 to 7 are stored from 0 to 15."""
    outputs, inputs = weight_NK.shape
    stored, scale = in_4_bits(weight_NK)
    if form == "pack-quantized":
        shape = torch.tensor([outputs, inputs])
        words = in_words(stored)
        return {"weight_packed": words, "weight_scale": scale, "weight_shape": shape}
    # GPTQ stores zero points less one.
    zeros = torch.full((inputs // GROUP, outputs), 7 if form == "gptq" else 8).int()
    if form == "gptq":
        order = torch.arange(inputs, dtype=torch.int32) // GROUP
        words, found = in_words(stored).t(), {"g_idx": order}
    else:
        words, found = in_words(stored.t(), AWQ_ORDER), {}
    zeros = in_words(zeros, AWQ_ORDER if form == "awq" else range(8))
    return found | {"qweight": words, "scales": scale.t(), "qzeros": zeros}


def in_4_bits(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers from 0 to 15 of a matrix, and a scale for each group of inputs."""
    grouped = weight_NK.view(len(weight_NK), -1, GROUP)
    scale = grouped.abs().amax(2, keepdim=True).clamp_min(1e-6) / 7
    stored = ((grouped / scale).round().clamp(-8, 7) + 8).view_as(weight_NK).int()
    return stored, scale[:, :, 0].to(torch.bfloat16)


def in_words(values: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Pack the last dimension, eight numbers to a word, the first in the lowest bits."""
    eight = values.unflatten(1, (-1, 8))[:, :, list(order)].to(torch.int64)
    words = (eight << (4 * torch.arange(8))).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
