"""D2F adapters: the merge equals its definition, and nothing is skipped silently."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trained_adapters
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.linear import LinearBase

from dllm_plugin.models.checkpoints import lora

pytestmark = pytest.mark.usefixtures("registered")

WIDTH, KV, LAYERS, RANK = 128, {"tiny-llada": 128, "tiny-dream": 64}, 3, 4
BOTH = pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
MODULE = {
    "tiny-llada": "model.transformer.blocks.{}.{}",
    "tiny-dream": "model.layers.{}.self_attn.{}",
}
TARGETS = {
    "tiny-llada": ["q_proj", "k_proj", "v_proj", "attn_out"],
    "tiny-dream": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


def modules(name: str) -> list[str]:
    return [
        MODULE[name].format(n, target)
        for n in range(LAYERS)
        for target in TARGETS[name]
    ]


def write_adapter(
    path: Path, name: str, dots: str = ".", change: Any = None, **config: Any
) -> Path:
    """A PEFT adapter with random matrices; `change` edits the tensors, keywords the config."""
    path.mkdir()
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for module in modules(name):
        rows = KV[name] if module.endswith(("k_proj", "v_proj")) else WIDTH
        rank = RANK
        if any(module.endswith(key) for key in config.get("rank_pattern", {})):
            rank = next(iter(config["rank_pattern"].values()))
        key = f"base_model.model.{module}.lora_{{}}{dots}weight"
        tensors[key.format("A")] = 0.1 * torch.randn(rank, WIDTH, generator=generator)
        tensors[key.format("B")] = 0.1 * torch.randn(rows, rank, generator=generator)
    if change is not None:
        change(tensors)
    save_file(tensors, path / lora.WEIGHTS_FILE)
    defaults = {
        "peft_type": "LORA",
        "base_model_name_or_path": f"someone/{name}",
        "r": RANK,
        "lora_alpha": 6,
        "lora_dropout": 0.1,
        "target_modules": TARGETS[name],
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (path / lora.CONFIG_FILE).write_text(json.dumps(defaults | config))
    return path


def merged(checkpoint: Path, adapter: Path) -> dict[str, torch.Tensor]:
    return dict(
        lora.merge(load_file(checkpoint / "model.safetensors").items(), read(adapter))
    )


def read(adapter: Path) -> lora.LoraAdapter:
    return lora.load_adapter(adapter)


@BOTH
@pytest.mark.parametrize("dots", [".", ".default."])
def test_merge_is_the_float32_sum_cast_back(name, dots, tmp_path, checkpoints):
    path = write_adapter(tmp_path / "adapter", name, dots)
    base = load_file(checkpoints / name / "model.safetensors")
    pairs = load_file(path / lora.WEIGHTS_FILE)
    result = merged(checkpoints / name, path)
    assert result.keys() == base.keys()
    for key, weight in base.items():
        module = key.removesuffix(".weight")
        if module in modules(name) and key.endswith(".weight"):
            a, b = (
                pairs[f"base_model.model.{module}.lora_{half}{dots}weight"]
                for half in "AB"
            )
            weight = (weight.float() + 6 / RANK * (b @ a)).to(torch.bfloat16)
        assert result[key].dtype == torch.bfloat16
        assert torch.equal(result[key], weight), key


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, {"q_proj": 6 / 4, "attn_out": 6 / 4}),
        ({"use_rslora": True}, {"q_proj": 6 / math.sqrt(4)}),
        ({"alpha_pattern": {"attn_out": 2}}, {"attn_out": 2 / 4, "q_proj": 6 / 4}),
        (
            {"rank_pattern": {"blocks.1.q_proj": 2}},
            {"1.q_proj": 6 / 2, "0.q_proj": 6 / 4},
        ),
    ],
)
def test_scale(config, scales, tmp_path):
    adapter = read(write_adapter(tmp_path / "adapter", "tiny-llada", **config))
    for end, scale in scales.items():
        found = {
            pair.scale for module, pair in adapter.pairs.items() if module.endswith(end)
        }
        assert found == {scale}


@BOTH
def test_model_loads_with_merged_weights(
    name, tmp_path, checkpoint, load_model, checkpoints
):
    adapter = write_adapter(tmp_path / "adapter", name)
    by_hand = checkpoint(name)
    save_file(merged(checkpoints / name, adapter), by_hand / "model.safetensors")
    options = {"additional_config": {"dllm": {"lora_path": str(adapter)}}}
    loaded = load_model(checkpoints / name, **options)
    wanted = load_model(by_hand)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for ours, theirs in zip(loaded.model.layers, wanted.model.layers, strict=True):
            for part in ("qkv_proj", "o_proj"):
                one, other = (
                    getattr(layer.self_attn, part)(x)[0] for layer in (ours, theirs)
                )
                assert torch.equal(one, other)


NEWER = {
    "a2d-qwen3": "q_proj",
    "nemotron": "o_proj",
    "idlm": "down_proj",
    "wedlm": "k_proj",
    "wedlm-qwen2": "gate_proj",
    "llada2.1": "dense",
    "llada2.2": "query_key_value",
}


def outputs_of_layers(model: Any) -> dict[str, torch.Tensor]:
    """What the linear layers of a model make of the same inputs."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(5, layer.input_size, generator=generator)
            with torch.inference_mode():
                output = layer(x)
            found[name] = output[0] if isinstance(output, tuple) else output
    return found


@pytest.mark.parametrize("family", NEWER)
def test_newer_families_load_with_merged_weights(
    family, tmp_path, checkpoint, checkpoints, load_model
):
    folder = checkpoints / f"tiny-{family}"
    adapter = trained_adapters.write_adapter(
        tmp_path / "adapter", folder, [NEWER[family]]
    )
    whole = checkpoint(folder.name)
    save_file(merged(folder, adapter), whole / "model.safetensors")
    options = {"additional_config": {"dllm": {"lora_path": str(adapter)}}}
    found = []
    for path, more in ((folder, options), (whole, {}), (folder, {})):
        found.append(outputs_of_layers(load_model(path, dtype="float32", **more)))
    loaded, wanted, base = found
    changed = 0
    for name, output in loaded.items():
        torch.testing.assert_close(output, wanted[name], rtol=1e-5, atol=1e-5)
        changed += not torch.allclose(output, base[name], rtol=1e-3, atol=1e-3)
    config = json.loads((folder / "config.json").read_text())
    assert changed >= config["num_hidden_layers"] - 1  # the first may have no experts


@BOTH
@pytest.mark.parametrize("half", ["A", "B"])
def test_missing_half_is_named(name, half, tmp_path):
    module = modules(name)[5]
    key = f"base_model.model.{module}.lora_{half}.weight"
    path = write_adapter(tmp_path / "adapter", name, change=lambda t: t.pop(key))
    with pytest.raises(ValueError, match=f"has no lora_{half} for '{module}'"):
        read(path)


@BOTH
def test_missing_module_is_named_at_load(name, tmp_path, checkpoints, load_model):
    module = MODULE[name].format(2, TARGETS[name][3])

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for half in "AB":
            tensors.pop(f"base_model.model.{module}.lora_{half}.weight")

    path = write_adapter(tmp_path / "adapter", name, change=drop)
    options = {"additional_config": {"dllm": {"lora_path": str(path)}}}
    with pytest.raises(ValueError, match=f"no matrices for '{module}': 11 of 12"):
        load_model(checkpoints / name, **options)


def test_coverage_of_targets_and_shapes(tmp_path, checkpoints):
    from transformers import AutoConfig

    from dllm_plugin.models.llamas import LLaDAModelLM

    shapes = LLaDAModelLM.checkpoint_shapes(
        AutoConfig.from_pretrained(checkpoints / "tiny-llada")
    )
    good = read(write_adapter(tmp_path / "good", "tiny-llada"))
    lora.check_coverage(good, shapes)
    other = read(write_adapter(tmp_path / "other", "tiny-dream"))
    with pytest.raises(
        ValueError, match="targets 'o_proj', a module this model does not have"
    ):
        lora.check_coverage(other, shapes)
    fewer = read(
        write_adapter(tmp_path / "fewer", "tiny-llada", target_modules=["q_proj"])
    )
    with pytest.raises(
        ValueError, match="blocks.0.attn_out', which is none of its target"
    ):
        lora.check_coverage(fewer, shapes)
    wide = {name: (shape[0], 256)[: len(shape)] for name, shape in shapes.items()}
    with pytest.raises(
        ValueError, match=r"as \(128, 128\), but the weight is \(128, 256\)"
    ):
        lora.check_coverage(good, wide)


def test_update_without_weight_is_named(tmp_path, checkpoints):
    adapter = read(write_adapter(tmp_path / "adapter", "tiny-llada"))
    base = load_file(checkpoints / "tiny-llada" / "model.safetensors")
    del base["model.transformer.blocks.1.attn_out.weight"]
    with pytest.raises(
        ValueError, match="1 of 12 updates .* 'model.transformer.blocks.1.attn_out"
    ):
        list(lora.merge(base.items(), adapter))


def test_quantised_weight_is_refused(tmp_path):
    adapter = read(write_adapter(tmp_path / "adapter", "tiny-llada"))
    weight = torch.zeros(WIDTH, WIDTH, dtype=torch.int8)
    with pytest.raises(ValueError, match="stored quantised"):
        list(lora.merge([(f"{modules('tiny-llada')[0]}.weight", weight)], adapter))


@pytest.mark.parametrize(
    ("base", "served"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", ["GSAI-ML/LLaDA-8B-Instruct"]),
        ("GSAI-ML/LLaDA-8B-Instruct", ["models/llada-8b-instruct/"]),
        ("/data/train/LLaDA-8B-Instruct/", ["GSAI-ML/LLaDA-8B-Instruct"]),
        ("GSAI-ML/LLaDA-8B-Instruct", ["weights", None, "GSAI-ML/LLaDA-8B-Instruct"]),
        (
            "GSAI-ML/LLaDA-8B-Instruct",
            ["hub/models--GSAI-ML--LLaDA-8B-Instruct/snapshots/9f3e"],
        ),
    ],
)
def test_same_base_under_other_paths(base, served, tmp_path):
    path = write_adapter(
        tmp_path / "adapter", "tiny-llada", base_model_name_or_path=base
    )
    lora.check_base(read(path), served)


@pytest.mark.parametrize("base", ["GSAI-ML/LLaDA-8B-Instruct", None, ""])
def test_other_base_is_refused_with_both_names(base, tmp_path):
    path = write_adapter(
        tmp_path / "adapter", "tiny-llada", base_model_name_or_path=base
    )
    trained = base or "an unnamed model"
    with pytest.raises(
        ValueError, match=f"on '{trained}', but the model served is 'x/LLaDA-8B-B"
    ):
        lora.check_base(read(path), ["x/LLaDA-8B-Base"])


def test_other_base_is_refused_at_load(tmp_path, checkpoints, load_model):
    path = write_adapter(
        tmp_path / "adapter", "tiny-llada", base_model_name_or_path="a/other"
    )
    options = {
        "additional_config": {"dllm": {"lora_path": str(path)}},
        "load_format": "dummy",
    }
    with pytest.raises(
        ValueError, match="trained on 'a/other', but the model served is"
    ):
        load_model(checkpoints / "tiny-llada", **options)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("layers_to_transform", [0]),
        ("target_modules", "all-linear"),
        ("target_modules", []),
    ],
)
def test_unmergeable_adapters_are_refused_by_key(key, value, tmp_path):
    path = write_adapter(tmp_path / "adapter", "tiny-llada", **{key: value})
    with pytest.raises(ValueError, match=f"has {key}="):
        read(path)


def test_unexpected_tensor_and_wrong_rank(tmp_path):
    name = "base_model.model.model.transformer.blocks.0.q_proj.lora_magnitude_vector"
    path = write_adapter(
        tmp_path / "dora",
        "tiny-llada",
        change=lambda t: t.update({name: torch.zeros(1)}),
    )
    with pytest.raises(ValueError, match=f"'{name}', which is no LoRA matrix"):
        read(path)
    with pytest.raises(ValueError, match=r"lora_A \(4, 128\) .* but rank 8"):
        read(write_adapter(tmp_path / "rank", "tiny-llada", r=8))


def test_broken_adapter_folders(tmp_path):
    with pytest.raises(ValueError, match="neither a directory nor a repository"):
        lora.adapter_folder(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="neither a directory nor a repository"):
        lora.adapter_folder("nobody/no-such-adapter")
    path = write_adapter(tmp_path / "adapter", "tiny-llada")
    file = path / lora.WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"Cannot read '{file}'"):
        read(path)
    file.unlink()
    with pytest.raises(ValueError, match=f"holds no {lora.WEIGHTS_FILE}"):
        read(path)
    (path / lora.CONFIG_FILE).write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read(path)
    (path / lora.CONFIG_FILE).unlink()
    with pytest.raises(ValueError, match=f"holds no {lora.CONFIG_FILE}"):
        read(path)
