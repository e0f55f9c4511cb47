"""Checkpoints through vLLM's loader: what is loaded, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from forwards import forward
from safetensors.torch import load_file, save_file

from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.models.checkpoints.unserved import check_readable
from dllm_plugin.models.checkpoints.weights import checkpoint_folder

BOTH = pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
HEAD = {"tiny-llada": "model.transformer.ff_out.weight", "tiny-dream": "lm_head.weight"}
EMBEDDING = {
    "tiny-llada": "model.transformer.wte.weight",
    "tiny-dream": "model.embed_tokens.weight",
}
Q_PROJ = {
    "tiny-llada": "model.transformer.blocks.1.q_proj.weight",
    "tiny-dream": "model.layers.1.self_attn.q_proj.weight",
}


def rewrite(path: Path, change) -> dict[str, torch.Tensor]:
    """Load model.safetensors of `path`, let `change` edit the dict, write it back."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors = {key: value.clone() for key, value in tensors.items()}
    change(tensors)
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def first_forward(model, prompt: list[int], block: int, mask_id: int) -> torch.Tensor:
    """Logits [T, V] of prompt and one masked block, each one bidirectional segment."""
    return forward(
        model, prompt + [mask_id] * block, [len(prompt), len(prompt) + block]
    )


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_first_forward_equals_reference(family, load_model, checkpoints, goldens):
    model = load_model(checkpoints / f"tiny-{family}")
    golden = json.loads((goldens / f"d2f_{family}.json").read_text())
    rows = load_file(goldens / f"d2f_{family}.logits.safetensors")
    (architecture,) = model.config.architectures
    assert FAMILIES[architecture].logits_shift is golden["logits_shift"]
    cases = [
        c
        for c in golden["cases"]
        if len(c["forwards"]) and c["forwards"][0]["commit_len"]
    ]
    assert len(cases) >= 5
    for case in cases:
        prompt, block = case["prompt_ids"], case["settings"]["block_size"]
        logits = first_forward(model, prompt, block, golden["mask_id"])
        wanted = rows[f"{case['id']}/first_logits"]
        positions = rows[f"{case['id']}/first_logits_rows"].long()
        torch.testing.assert_close(
            logits[positions], wanted, atol=5e-4, rtol=0, msg=case["id"]
        )


def matrix(layer, columns: int) -> torch.Tensor:
    """A linear layer's weight [out, in] and bias as last column, read through its kernel."""
    with torch.inference_mode():
        bias = layer(torch.zeros(1, columns))[0]
        return torch.cat([layer(torch.eye(columns))[0] - bias, bias]).T


@BOTH
def test_packed_projections_hold_their_parts_in_order(name, load_model, checkpoints):
    model = load_model(checkpoints / name)
    stored = load_file(checkpoints / name / "model.safetensors")
    layer = model.model.layers[2]
    if name == "tiny-llada":
        attention = mlp = "model.transformer.blocks.2."
        gate, up, down, out = "ff_proj", "up_proj", "ff_out", "attn_out"
    else:
        attention, mlp = "model.layers.2.self_attn.", "model.layers.2.mlp."
        gate, up, down, out = "gate_proj", "up_proj", "down_proj", "o_proj"

    def check(module, *parts: str) -> None:
        weight = torch.cat([stored[f"{part}.weight"] for part in parts]).float()
        zero = torch.zeros(len(weight))
        biases = [stored[f"{p}.bias"].float() for p in parts if f"{p}.bias" in stored]
        bias = torch.cat(biases) if biases else zero
        wanted = torch.cat([weight, bias[:, None]], dim=1)
        torch.testing.assert_close(
            matrix(module, weight.shape[1]), wanted, atol=1e-6, rtol=0
        )

    check(layer.self_attn.qkv_proj, *(f"{attention}{part}_proj" for part in "qkv"))
    check(layer.self_attn.o_proj, f"{attention}{out}")
    check(layer.mlp.gate_up_proj, f"{mlp}{gate}", f"{mlp}{up}")
    check(layer.mlp.down_proj, f"{mlp}{down}")
    assert torch.equal(model.model.embed_tokens.weight, stored[EMBEDDING[name]].float())


@BOTH
def test_no_rows_give_empty_logits(name, load_model, checkpoints):
    model = load_model(checkpoints / name, load_format="dummy")
    assert model.compute_logits(torch.empty(0, 128)).shape == (0, 320)


@BOTH
@pytest.mark.parametrize("repeat", [False, True])
def test_tied_checkpoint_with_and_without_head(name, repeat, checkpoint, load_model):
    path = checkpoint(name, tie_word_embeddings=True, weight_tying=True)

    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(HEAD[name])
        if repeat:
            tensors[HEAD[name]] = tensors[EMBEDDING[name]].clone()

    embedding = rewrite(path, tie)[EMBEDDING[name]].float()
    model = load_model(path)
    hidden = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model.compute_logits(hidden), hidden @ embedding.T)


@BOTH
def test_sharded_checkpoint(name, checkpoint, load_model, checkpoints):
    path = checkpoint(name)
    file = path / "model.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file(
            {n: tensors[n].clone() for n in part},
            path / shard,
            metadata={"format": "pt"},
        )
        index |= dict.fromkeys(part, shard)
    file.unlink()
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    prompt = [5, 6, 7]
    whole, sharded = load_model(checkpoints / name), load_model(path)
    assert torch.equal(*(first_forward(m, prompt, 8, 279) for m in (whole, sharded)))


@BOTH
@pytest.mark.parametrize("which", [Q_PROJ, EMBEDDING, HEAD])
def test_missing_weight_is_named(name, which, checkpoint, load_model):
    path = checkpoint(name)
    rewrite(path, lambda t: t.pop(which[name]))
    with pytest.raises(ValueError, match=f"no weight '{which[name]}'"):
        load_model(path)


@BOTH
@pytest.mark.parametrize("surplus", ["o_proj.bias", "gate.weight"])
def test_surplus_weight_is_named(name, surplus, checkpoint, load_model):
    path = checkpoint(name)
    extra = Q_PROJ[name].replace("q_proj.weight", surplus)
    rewrite(path, lambda t: t.update({extra: torch.zeros(128)}))
    with pytest.raises(
        ValueError, match=f"weight '{extra}' that this model does not have"
    ):
        load_model(path)


@BOTH
def test_rotary_buffers_are_ignored(name, checkpoint, load_model):
    path = checkpoint(name)
    extra = Q_PROJ[name].replace("q_proj.weight", "rotary_emb.inv_freq")
    rewrite(path, lambda t: t.update({extra: torch.zeros(16)}))
    load_model(path)


@BOTH
def test_misshaped_weight_is_named_with_both_shapes(name, checkpoint, load_model):
    path = checkpoint(name)
    rewrite(path, lambda t: t.update({Q_PROJ[name]: torch.zeros(128, 96)}))
    with pytest.raises(
        ValueError, match=r"q_proj.* \(128, 96\), .* asks for \(128, 128\)"
    ):
        load_model(path)


@BOTH
@pytest.mark.parametrize("keep", [0, 100, 500_000])
def test_damaged_file_is_named(name, keep, checkpoint, load_model):
    path = checkpoint(name)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        ValueError, match=rf"Cannot read '{file}': the file is truncated"
    ):
        load_model(path)


def test_damaged_shard_is_found_without_loading(checkpoint):
    path = checkpoint("tiny-llada")
    check_readable(path)
    (path / "model-00002-of-00002.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(
        ValueError, match="model-00002-of-00002.safetensors': the file is trunc"
    ):
        check_readable(path)


def test_folder_of_an_unknown_repository_is_unknown(checkpoints):
    assert checkpoint_folder("nobody/no-such-model", None, None) is None
    assert checkpoint_folder("s3://bucket/model", None, None) is None
    assert checkpoint_folder(str(checkpoints), None, None) == checkpoints


def test_manifest_has_the_published_size(registered):
    """Sizes in bytes of the bf16 weight indexes of these models, or of the Qwen they start from."""
    from dllm_plugin.models import configs, mixture_configs
    from dllm_plugin.models.llamas import (
        LLaDAModelLM,
        Qwen2Diffusion,
        Qwen3Diffusion,
    )
    from dllm_plugin.models.mixtures import Qwen3MoeDiffusion

    qwen2 = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    qwen3 = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    for model, config, size in (
        (LLaDAModelLM, configs.LLaDAConfig(mlp_hidden_size=12288), 16_031_162_368),
        (Qwen2Diffusion, configs.DreamConfig(**qwen2), 15_231_233_024),
        (Qwen2Diffusion, configs.FastDLLMConfig(**qwen2), 15_231_233_024),
        (Qwen3Diffusion, configs.SDARConfig(**qwen3), 16_381_470_720),
        (
            Qwen3MoeDiffusion,
            mixture_configs.SDARMoeConfig(num_hidden_layers=48),
            61_064_245_248,
        ),
    ):
        shapes = model.checkpoint_shapes(config).values()
        assert 2 * sum(math.prod(shape) for shape in shapes) == size
