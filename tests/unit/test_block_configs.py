"""config.json of SDAR, LLaDA2 and Fast-dLLM v2, and where masks, ends and blocks are found."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.options import Options
from dllm_plugin.config.request.parsing import arguments_of
from dllm_plugin.config.resolution import resolve
from dllm_plugin.decoding.families import FAMILIES, FAST_DLLM, LLADA, LLADA2, RND1, SDAR
from dllm_plugin.engine.admission import request_rules
from dllm_plugin.models.checkpoints import trained_for
from dllm_plugin.models.checkpoints.trained_for import (
    find_mask_token,
    find_turn_ends,
    trained_block_length,
)

pytestmark = pytest.mark.usefixtures("registered")

# The published sizes of JetLM/SDAR-4B-Chat; a training copy also has block_size, mask_token_id.
SDAR_4B = {
    "model_type": "sdar",
    "architectures": ["SDARForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig"},
    "attention_bias": False,
    "attn_implementation": "flex_attention",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "fuse_cross_entropy": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# The keys of inclusionAI/LLaDA2.0-mini that an older export may lack, left out.
LLADA2_MINI = {
    "model_type": "llada2_moe",
    "architectures": ["LLaDA2MoeModelLM"],
    "auto_map": {"AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig"},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 600000,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "vocab_size": 157184,
}


# The published file names LLaDA's model type; the architecture decides.
LLADA_MOE = {"model_type": "llada", "architectures": ["LLaDAMoEModelLM"]}


def read(tmp_path, config: dict):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(tmp_path)


def test_sdar_reads_as_qwen3(tmp_path):
    config = read(tmp_path, SDAR_4B)
    assert config.head_dim * config.num_attention_heads == 4096 != config.hidden_size
    assert config.tie_word_embeddings is False and config.sliding_window is None
    assert config.rope_parameters == {"rope_theta": 1000000, "rope_type": "default"}
    assert config.mask_token_id is config.block_size is config.pad_token_id is None


@pytest.mark.parametrize(
    "model_type", ["llada2_moe", "llada2_moe_veomni", "llada21_moe"]
)
def test_llada2_reads_as_ling(tmp_path, model_type):
    config = read(tmp_path, LLADA2_MINI | {"model_type": model_type})
    assert config.model_type == model_type and config.sliding_window is None
    assert config.rope_parameters == {
        "rope_theta": 600000,
        "rope_type": "default",
        "partial_rotary_factor": 0.5,
    }
    # Without these keys vLLM's model takes LayerNorm, no q/k norm and softmax scores.
    assert (
        config.use_rmsnorm and config.use_qk_norm and config.score_function == "sigmoid"
    )
    assert config.router_dtype == "fp32" and config.moe_router_enable_expert_bias
    assert config.mask_token_id is config.eos_token_id is None


@pytest.mark.parametrize("model_type", ["llada", "lladamoe"])
def test_llada_moe_reads_as_qwen3_moe(tmp_path, model_type):
    given = LLADA_MOE | {"model_type": model_type, "norm_topk_prob": None}
    config = read(tmp_path, given | {"rope_scaling": None})
    assert config.model_type == "lladamoe" and config.norm_topk_prob is False
    assert (config.moe_intermediate_size, config.head_dim) == (1024, 128)
    assert config.rope_parameters == {"rope_theta": 50000.0, "rope_type": "default"}
    with pytest.raises(ValueError, match="has moe_layer_freq="):
        read(tmp_path, given | {"moe_layer_freq": [1, 0]})
    with pytest.raises(ValueError, match="rope_type"):
        read(tmp_path, given | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (SDAR_4B, "attention_bias", True),
        (SDAR_4B, "use_sliding_window", True),
        (SDAR_4B, "hidden_act", "gelu"),
        (SDAR_4B | {"model_type": "sdar_moe"}, "attention_bias", True),
        (SDAR_4B | {"model_type": "Fast_dLLM_Qwen"}, "use_mrope", True),
        (LLADA2_MINI, "score_function", "softmax"),
        (LLADA2_MINI, "use_qkv_bias", True),
        (LLADA2_MINI, "norm_head", True),
        (LLADA2_MINI, "use_sliding_window", True),
        (LLADA2_MINI, "moe_router_enable_expert_bias", False),
        (LLADA_MOE, "moe_router_enable_expert_bias", True),
        (LLADA_MOE, "shared_expert_intermediate_size", 512),
        (LLADA_MOE, "clip_qkv", 8.0),
        (SDAR_4B | {"model_type": "rnd1"}, "is_causal", True),
        (LLADA_MOE, "attention_bias", True),
        (LLADA_MOE, "qk_layernorm", False),
    ],
)
def test_variants_are_refused_by_key(tmp_path, base, key, value):
    with pytest.raises(
        ValueError, match=f"checkpoint has {key}={value!r}.*only {key}="
    ):
        read(tmp_path, base | {key: value})


@pytest.mark.parametrize(
    ("name", "mask", "found_in", "ends"),
    [
        ("tiny-sdar", 282, "config.json", (258,)),
        ("tiny-sdar-moe", 282, "tokenizer token '<|MASK|>'", (258,)),
        ("tiny-llada2.0", 260, "tokenizer token '<|mask|>'", (257, 265)),
        ("tiny-llada-moe", 260, "tokenizer token '<|mask|>'", (257, 265)),
        ("tiny-rnd1", 282, "config.json", (258,)),
        ("tiny-fast-dllm-v2", 278, "tokenizer token '|<MASK>|'", (258,)),
    ],
)
def test_mask_and_ends(name, mask, found_in, ends, checkpoints, vllm_config_for):
    model_config = vllm_config_for(checkpoints / name).model_config
    family = FAMILIES[model_config.architecture]
    assert find_mask_token(model_config, family) == (mask, found_in)
    assert find_turn_ends(model_config, family) == ends


@pytest.mark.parametrize("given", ["282", 5.0, True])
def test_mask_tokens_that_are_no_numbers_are_refused(given):
    with pytest.raises(ValueError, match=f"mask_token_id {given!r} .* whole number"):
        find_mask_token(served("weights", mask_token_id=given), SDAR)


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        (RND1, "tokenizers of RND1 do not say which it is; add"),
        (SDAR, r"the tokenizer has none of <\|MASK\|>, <MASK>; add"),
    ],
)
def test_missing_mask_tokens_are_refused(family, sentence, monkeypatch):
    monkeypatch.setattr(trained_for, "tokenizer_ids", lambda model_config: {})
    with pytest.raises(ValueError, match=f"no mask_token_id and {sentence}"):
        find_mask_token(served("weights"), family)


def served(model: str, **config):
    """What the lookup reads of a ModelConfig."""
    return SimpleNamespace(
        model=model, hf_config=SimpleNamespace(source_name=None, **config)
    )


@pytest.mark.parametrize(
    ("model", "config", "family", "length"),
    [
        ("JetLM/SDAR-8B-Chat", {"block_size": None}, SDAR, 4),
        ("JetLM/SDAR-8B-Chat-b32", {"block_size": None}, SDAR, 32),
        (
            "hub/models--JetLM--SDAR-8B-Chat-b16/snapshots/9f3e",
            {"block_size": None},
            SDAR,
            16,
        ),
        ("JetLM/SDAR-8B-Chat-b32", {"block_size": 8}, SDAR, 8),
        (
            "weights",
            {"block_size": None, "source_name": "JetLM/SDAR-1.7B-b64"},
            SDAR,
            64,
        ),
        ("inclusionAI/LLaDA2.0-mini-b8", {}, LLADA2, 32),
        ("somewhere", {"bd_size": 32}, FAST_DLLM, 32),
        ("somewhere", {"bd_size": None}, FAST_DLLM, 32),
        ("GSAI-ML/LLaDA-8B-Base", {}, LLADA, None),
    ],
)
def test_trained_block_length(model, config, family, length):
    given = served(model)
    vars(given.hf_config).update(config)
    assert trained_block_length(given, family)[0] == length


ALIASES = [
    # name, tiny checkpoint of its layout, strategy, threshold, block length
    ("Dream-org/Dream-Coder-v0-Instruct-7B", "tiny-dream", "dual_cache", 0.9, 32),
    ("Zigeng/dParallel-LLaDA-8B-instruct", "tiny-llada", "dual_cache", 0.5, 32),
    ("Zigeng/dParallel_Dream_7B_Instruct", "tiny-dream", "dual_cache", 0.9, 32),
    ("d3LLM/d3LLM_LLaDA", "tiny-llada", "dual_cache", 0.9, 32),
    ("d3LLM/d3LLM_Dream", "tiny-dream", "dual_cache", 0.9, 32),
    ("d3LLM/d3LLM_Dream_Coder", "tiny-dream", "dual_cache", 0.9, 32),
    ("Gen-Verse/TraDo-8B-Instruct", "tiny-sdar", "block_diffusion", 0.9, 4),
    ("Gen-Verse/TraDo-8B-Thinking", "tiny-sdar", "block_diffusion", 0.9, 4),
    ("Zigeng/DMax-Math-16B", "tiny-llada2.0", "block_diffusion", 0.95, 32),
    ("inclusionAI/LLaDA2.0-mini-preview", "tiny-llada2.0", "block_diffusion", 0.95, 32),
    ("inclusionAI/LLaDA2.0-mini-CAP", "tiny-llada2.0", "block_diffusion", 0.95, 32),
]


@pytest.mark.parametrize(("name", "layout", "strategy", "threshold", "block"), ALIASES)
def test_checkpoints_of_a_known_layout_get_the_defaults_of_their_cards(
    name, layout, strategy, threshold, block, checkpoint, vllm_config_for, logged
):
    path = checkpoint(layout, block_size=None)
    path = path.rename(path.parent / name.partition("/")[2])
    found = get_decode_config(vllm_config_for(path))
    assert (found.strategy, found.block_length) == (strategy, block)
    assert found.policy == "threshold" and found.defaults.threshold == threshold
    assert not any("how long the blocks" in text for text in logged)


@pytest.mark.parametrize("length", [0, 4.0, "4", True])
def test_wrong_block_length_is_refused(length):
    with pytest.raises(
        ValueError, match="block_size in config.json must be a whole number"
    ):
        trained_block_length(served("sdar", block_size=length), SDAR)


@pytest.mark.parametrize("key", ["pad_token_id", "eos_token_id"])
def test_rnd1_needs_what_its_last_position_holds(key, checkpoint, vllm_config_for):
    """A file without the key has the authors' token; a null has none."""
    path = checkpoint("tiny-rnd1", **{key: None})
    with pytest.raises(ValueError, match="config.json lacks pad_token_id or eos_token"):
        vllm_config_for(path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    del config[key]
    file.write_text(json.dumps(config))
    reserved = vllm_config_for(path).additional_config["dllm"]["reserved"]
    assert sorted(reserved)[-1] in (151643, 151645)


def test_structured_output_reserves_no_position():
    config = resolve(Options(), "RND1LM", 64, 282, reserved=(256, 258))
    grammar = StructuredOutputsParams(regex="a+")
    asked = SamplingParams(max_tokens=8, structured_outputs=grammar)
    assert arguments_of(config, asked).template is None
    assert arguments_of(config, SamplingParams(max_tokens=8)).template is not None
    asked.extra_args = {"dllm_add_eos_at_end": True}
    with pytest.raises(ValueError, match="no effect with structured_outputs"):
        request_rules(config).validate_params(asked)


def test_targets_reserve_no_position():
    config = resolve(Options(), "RND1LM", 64, 282, reserved=(256, 258))
    asked = SamplingParams(max_tokens=2, logprobs=1)
    asked.extra_args = {
        "dllm_template": [5, -1],
        "dllm_targets": [7],
        "dllm_add_eos_at_end": True,
    }
    with pytest.raises(ValueError, match="no effect with dllm_targets"):
        request_rules(config).validate_params(asked)
