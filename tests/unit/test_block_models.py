"""Block-causal families through vLLM's loader and forward: SDAR, LLaDA2 and Fast-dLLM v2."""

import json

import pytest
import torch
from forwards import forward
from safetensors.torch import load_file, save_file
from test_weights import rewrite

from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.models.checkpoints import lora
from dllm_plugin.reference.model import PlainModel

TRACES = {
    "sdar_static": "tiny-sdar",
    "sdar_moe_static": "tiny-sdar-moe",
    "llada2_threshold": "tiny-llada2.0",
    "llada21_joint": "tiny-llada2.1",
    "llada22_levenshtein": "tiny-llada2.2",
    "fast_dllm": "tiny-fast-dllm-v2",
    "fast_dllm_tied": "tiny-fast-dllm-v2-tied",
    "stable_diffcoder_quota": "tiny-stable-diffcoder",
    "a2d_mdlm": "tiny-a2d-qwen3",
}
MIXTURES = ("tiny-llada-moe", "tiny-rnd1")  # of full attention
ALL = pytest.mark.parametrize("name", [*TRACES.values(), *MIXTURES])
LLADA2 = pytest.mark.parametrize(
    "name", ["tiny-llada2.0", "tiny-llada2.1", "tiny-llada2.2"]
)
LAYER = "model.layers.1."


def first_call(case: dict, mask_id: int) -> tuple[list[int], list[int]]:
    """Tokens and block ends of the first recorded call."""
    length = case["forwards"][0]["kv_len"]
    tokens = (case["prompt_ids"] + [mask_id] * length)[:length]
    if case["forwards"][0]["kind"] == "full":
        return tokens, [length]
    settings = case["settings"]
    block = settings.get("block_length") or settings["block_size"]
    return tokens, list(range(block, length + 1, block))


@pytest.mark.parametrize("trace", TRACES)
def test_first_call_equals_reference(trace, load_model, checkpoints, goldens):
    model = load_model(checkpoints / TRACES[trace])
    golden = json.loads((goldens / f"{trace}.json").read_text())
    rows = load_file(goldens / f"{trace}.logits.safetensors")
    (architecture,) = model.config.architectures
    assert FAMILIES[architecture].logits_shift is golden["logits_shift"]
    for case in golden["cases"]:
        tokens, stops = first_call(case, golden["mask_id"])
        logits = forward(model, tokens, stops)
        positions = rows[f"{case['id']}/first_logits_rows"].long()
        wanted = rows[f"{case['id']}/first_logits"]
        torch.testing.assert_close(
            logits[positions], wanted, atol=5e-4, rtol=0, msg=case["id"]
        )


@ALL
def test_every_stored_number_is_used_once(name, vllm_config_for, checkpoints):
    """The parameters hold the numbers of the checkpoint, each once, and no other."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    config = vllm_config_for(checkpoints / name)
    with set_current_vllm_config(config):
        model = initialize_model(config)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    loaded = torch.cat([p.data.float().flatten() for p in model.parameters()])
    stored = load_file(checkpoints / name / "model.safetensors").values()
    wanted = torch.cat([tensor.float().flatten() for tensor in stored])
    assert torch.equal(loaded.sort().values, wanted.sort().values)


@ALL
def test_head_is_tied_as_configured(name, load_model, checkpoints):
    model = load_model(checkpoints / name)
    stored = load_file(checkpoints / name / "model.safetensors")
    tied = name in ("tiny-fast-dllm-v2-tied", "tiny-a2d-qwen3")
    assert (
        model.config.tie_word_embeddings is tied
        and ("lm_head.weight" in stored) is not tied
    )
    embedding = "model.word_embeddings" if "llada2" in name else "model.embed_tokens"
    head = stored[f"{embedding}.weight" if tied else "lm_head.weight"].float()
    hidden = torch.randn(
        3, model.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    with torch.inference_mode():
        torch.testing.assert_close(model.compute_logits(hidden), hidden @ head.T)
        assert model.compute_logits(hidden[:0]).shape == (0, 320)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("tiny-sdar", "lm_head.weight"),
        ("tiny-sdar", f"{LAYER}self_attn.k_norm.weight"),
        ("tiny-sdar-moe", f"{LAYER}mlp.experts.7.up_proj.weight"),
        ("tiny-sdar-moe", f"{LAYER}mlp.gate.weight"),
        ("tiny-llada-moe", f"{LAYER}mlp.experts.7.gate_proj.weight"),
        ("tiny-rnd1", f"{LAYER}self_attn.q_norm.weight"),
        ("tiny-llada2.0", f"{LAYER}attention.query_key_value.weight"),
        ("tiny-llada2.0", f"{LAYER}mlp.gate.expert_bias"),
        ("tiny-llada2.0", f"{LAYER}mlp.shared_experts.down_proj.weight"),
        ("tiny-fast-dllm-v2", "lm_head.weight"),
        ("tiny-stable-diffcoder", f"{LAYER}self_attn.v_proj.weight"),
        ("tiny-a2d-qwen3", f"{LAYER}self_attn.q_norm.weight"),
        ("tiny-fast-dllm-v2-tied", f"{LAYER}self_attn.v_proj.bias"),
    ],
)
def test_missing_weight_is_named(name, weight, checkpoint, load_model):
    path = checkpoint(name)
    rewrite(path, lambda t: t.pop(weight))
    with pytest.raises(ValueError, match=f"no weight '{weight}'"):
        load_model(path)


def test_experts_that_the_loader_leaves_to_other_ranks(checkpoint, load_model):
    path = checkpoint("tiny-sdar-moe")
    rewrite(path, lambda t: t.pop(f"{LAYER}mlp.experts.7.up_proj.weight"))
    load_model(path, enable_expert_parallel=True, enable_ep_weight_filter=True)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("tiny-sdar", f"{LAYER}self_attn.q_proj.bias"),
        ("tiny-sdar-moe", f"{LAYER}mlp.gate_proj.weight"),
        ("tiny-llada2.0", "model.layers.0.mlp.gate.expert_bias"),
        (
            "tiny-llada2.0",
            f"{LAYER}mlp.experts.gate_proj",
        ),  # as dFactory merges experts
        ("tiny-fast-dllm-v2", f"{LAYER}self_attn.q_norm.weight"),
        ("tiny-stable-diffcoder", f"{LAYER}self_attn.q_proj.bias"),
        ("tiny-llada-moe", f"{LAYER}mlp.gate.expert_bias"),
        ("tiny-rnd1", f"{LAYER}mlp.shared_expert.up_proj.weight"),
        ("tiny-a2d-qwen3", f"{LAYER}self_attn.q_proj.bias"),
    ],
)
def test_surplus_weight_is_named(name, weight, checkpoint, load_model):
    path = checkpoint(name)
    rewrite(path, lambda t: t.update({weight: torch.zeros(16)}))
    with pytest.raises(
        ValueError, match=f"weight '{weight}' that this model does not have"
    ):
        load_model(path)


def test_queries_may_be_wider_than_the_model(checkpoint, load_model):
    path, weight = checkpoint("tiny-sdar"), f"{LAYER}self_attn.q_proj.weight"
    rewrite(path, lambda t: t.update({weight: torch.zeros(128, 128)}))
    with pytest.raises(
        ValueError, match=r"q_proj.* \(128, 128\), .* asks for \(256, 128\)"
    ):
        load_model(path)


def test_some_layers_without_experts(checkpoint, load_model, checkpoints):
    """The keys of Qwen3-MoE that say which layers are dense are honoured."""
    path = checkpoint("tiny-sdar-moe", mlp_only_layers=[1])
    dense = load_file(checkpoints / "tiny-sdar" / "model.safetensors")

    def thin(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(f"{LAYER}mlp.")]:
            del tensors[key]
        tensors |= {
            k: v.clone() for k, v in dense.items() if k.startswith(f"{LAYER}mlp.")
        }

    rewrite(path, thin)
    model = load_model(path)
    assert forward(model, [1, 2, 3, 4], [4]).isfinite().all()


@LLADA2
def test_router_stays_in_float32(name, load_model, checkpoints):
    """Weights, bias and logits, in a bfloat16 model and from bfloat16 files."""
    model = load_model(checkpoints / name, dtype="bfloat16")
    stored = load_file(checkpoints / name / "model.safetensors")
    gate, seen = model.model.layers[1].mlp.gate, []
    assert gate.expert_bias.dtype == torch.float32
    assert torch.equal(gate.expert_bias, stored[f"{LAYER}mlp.gate.expert_bias"].float())
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["router_logits"]),
        with_kwargs=True,
    )
    hidden = []
    gate.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    forward(model, list(range(8)), [8])
    wanted = hidden[0].float() @ stored[f"{LAYER}mlp.gate.weight"].float().T
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0], wanted, atol=1e-4, rtol=1e-4)


@LLADA2
def test_window_of_the_config_is_not_used(name, load_model, checkpoints):
    model = load_model(checkpoints / name)
    assert model.vllm_config.cache_config.sliding_window is None
    assert all(
        layer.attention.attn.sliding_window is None for layer in model.model.layers
    )


@ALL
def test_what_the_parent_offers_stays(name, load_model, checkpoints):
    from vllm.model_executor.models.interfaces import (
        is_mixture_of_experts,
        supports_lora,
    )

    model = load_model(checkpoints / name, load_format="dummy")
    assert supports_lora(model)
    packed = "query_key_value" if "llada2" in name else "qkv_proj"
    assert packed in model.packed_modules_mapping
    assert is_mixture_of_experts(model) is (name in ("tiny-sdar-moe", *MIXTURES))


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("tiny-sdar", {"self_attn.q_proj": (256, 128), "self_attn.o_proj": (128, 256)}),
        ("tiny-sdar-moe", {"mlp.experts.3.up_proj": (64, 128)}),
        ("tiny-llada-moe", {"self_attn.q_proj": (128, 128)}),
        ("tiny-rnd1", {"self_attn.o_proj": (128, 256)}),
        ("tiny-stable-diffcoder", {"mlp.down_proj": (128, 256)}),
        ("tiny-a2d-qwen3", {"self_attn.q_proj": (256, 128)}),
        ("tiny-llada2.0", {"attention.query_key_value": (256, 128)}),
        ("tiny-fast-dllm-v2-tied", {"self_attn.k_proj": (64, 128)}),
    ],
)
def test_adapter_is_merged(
    name, modules, tmp_path, checkpoint, load_model, checkpoints
):
    """By checkpoint names, also into packed projections and single experts.

    The logits are those of the plain model, which adds the update by itself.
    """
    layers = json.loads((checkpoints / name / "config.json").read_text())[
        "num_hidden_layers"
    ]
    adapter, pairs = tmp_path / "adapter", {}
    adapter.mkdir()
    generator = torch.Generator().manual_seed(7)
    for module, (rows, columns) in modules.items():
        for layer in range(layers):
            key = f"base_model.model.model.layers.{layer}.{module}.lora_{{}}.weight"
            pairs[key.format("A")] = 0.1 * torch.randn(4, columns, generator=generator)
            pairs[key.format("B")] = 0.1 * torch.randn(rows, 4, generator=generator)
    save_file(pairs, adapter / lora.WEIGHTS_FILE)
    described = {
        "peft_type": "LORA",
        "base_model_name_or_path": f"someone/{name}",
        "r": 4,
        "lora_alpha": 4,
        "target_modules": list(modules),
    }
    (adapter / lora.CONFIG_FILE).write_text(json.dumps(described))
    by_hand, loaded = checkpoint(name), lora.load_adapter(adapter)
    rewrite(by_hand, lambda t: t.update(dict(lora.merge(list(t.items()), loaded))))
    options = {"additional_config": {"dllm": {"lora_path": str(adapter)}}}
    found, wanted, plain = (
        forward(load_model(path, **more), [5, 6, 7, 8], [4])
        for path, more in (
            (checkpoints / name, options),
            (by_hand, {}),
            (checkpoints / name, {}),
        )
    )
    assert torch.equal(found, wanted) and not torch.equal(found, plain)
    second = PlainModel.load(checkpoints / name, 0, adapter=adapter)
    rows = second.rows([5, 6, 7, 8], [0] * 4)
    torch.testing.assert_close(found, rows, atol=5e-4, rtol=0)
