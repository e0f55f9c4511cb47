"""Write tiny checkpoints quantised, as compressed-tensors W8A8, which vLLM runs on CPUs as well."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LARGEST = {"int": 127.0, "float": 448.0}
HEAD = {"tiny-llada": "model.transformer.ff_out", "tiny-dream": "lm_head"}
SKIPPED = (
    *(
        "model.transformer.ff_out",
        "model.transformer.wte",
        "lm_head",
        "model.embed_tokens",
    ),
    "model.word_embeddings",
)
MIXTURES = ("tiny-sdar-moe", "tiny-llada2.0", "tiny-llada2.1")

# vLLM's int8 kernel for CPUs with AMX takes no float32; those of other CPUs are exact with it.
DTYPE = torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def quantise(path: Path, name: str, kind: str, drop: str = "") -> Path:
    """Rewrite a checkpoint as llm-compressor does: per-channel weights, per-token activations."""
    file = path / "model.safetensors"
    tensors = {}
    for key, weight in load_file(file).items():
        module = key.removesuffix(".weight")
        # vLLM has no quantised experts on the CPU; on GPUs they are its own affair.
        left_out = module in SKIPPED or (name in MIXTURES and ".mlp." in module)
        if weight.ndim == 2 and not left_out:
            scale = weight.float().abs().amax(1, keepdim=True) / LARGEST[kind]
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
        "ignore": [
            HEAD.get(name, "lm_head"),
            *(["re:.*mlp.*"] if name in MIXTURES else []),
        ],
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
