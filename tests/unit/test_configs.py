"""config.json of real checkpoints, read without their Python code."""

import json
import pickle
import subprocess
import sys

import pytest
from recorded_decodes import WITH_TOKENIZERS
from transformers import AutoConfig

from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.models import ARCHITECTURES, register_configs

pytestmark = pytest.mark.usefixtures("registered")

# The published sizes of GSAI-ML/LLaDA-8B-Instruct and Dream-org/Dream-v0-Instruct-7B.
LLADA_8B = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"},
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "weight_tying": False,
    "activation_type": "silu",
    "block_type": "llama",
    "multi_query_attention": None,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "pad_token_id": 126081,
    "torch_dtype": "bfloat16",
}


def read(tmp_path, config: dict):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(tmp_path)


def test_llada_reads_as_llama(tmp_path):
    config = read(tmp_path, LLADA_8B)
    assert config.hidden_size == 4096 and config.num_hidden_layers == 32
    assert config.num_attention_heads == config.num_key_value_heads == 32
    assert config.intermediate_size == 12288 and config.max_position_embeddings == 4096
    assert config.rope_parameters == {"rope_theta": 500000.0, "rope_type": "default"}
    assert config.hidden_act == "silu" and config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings is False and config.vocab_size == 126464
    assert (config.mask_token_id, config.eos_token_id) == (126336, 126081)


def test_llada_fallbacks(tmp_path):
    config = read(
        tmp_path,
        LLADA_8B | {"n_kv_heads": None, "mlp_hidden_size": None, "vocab_size": 126349},
    )
    assert config.num_key_value_heads == 32
    assert config.intermediate_size == 4 * 4096
    assert config.vocab_size == 126464  # rows of the weight matrices


def test_llada_defaults_need_no_keys():
    from dllm_plugin.models.configs import LLaDAConfig

    config = LLaDAConfig()
    assert (
        config.rope_parameters["rope_theta"] == 500000.0 and config.vocab_size == 126464
    )


def test_dream_reads_as_qwen2(checkpoints):
    config = AutoConfig.from_pretrained(checkpoints / "tiny-dream")
    assert config.rope_parameters == {"rope_theta": 1000000.0, "rope_type": "default"}
    assert config.mask_token_id == 279 and config.num_key_value_heads == 2
    assert config.sliding_window is None and set(config.layer_types) == {
        "full_attention"
    }
    assert config.source_name == "Dream-org/Dream-v0-Instruct-7B"


@pytest.mark.parametrize("name", WITH_TOKENIZERS)
def test_configs_travel_to_workers(name, checkpoints, tmp_path):
    config = AutoConfig.from_pretrained(checkpoints / name)
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == config.rope_parameters
    assert again.num_hidden_layers == config.num_hidden_layers


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alibi", True),
        ("rope", False),
        ("block_type", "sequential"),
        ("block_group_size", 2),
        ("layer_norm_type", "default"),
        ("include_bias", True),
        ("include_qkv_bias", True),
        ("input_emb_norm", True),
        ("attention_layer_norm", True),
        ("scale_logits", True),
        ("multi_query_attention", True),
        ("activation_type", "swiglu"),
        ("clip_qkv", 8.0),
    ],
)
def test_llada_variants_are_refused_by_key(tmp_path, key, value):
    with pytest.raises(
        ValueError, match=f"LLaDA checkpoint has {key}={value!r}.*only {key}="
    ):
        read(tmp_path, LLADA_8B | {key: value})


def test_llada_embedding_smaller_than_vocabulary(tmp_path):
    with pytest.raises(
        ValueError, match="embedding_size=100 .* less than vocab_size=126464"
    ):
        read(tmp_path, LLADA_8B | {"embedding_size": 100})


@pytest.mark.parametrize("key", ["use_mrope", "use_sliding_window"])
def test_dream_variants_are_refused_by_key(checkpoint, key):
    with pytest.raises(ValueError, match=f"Dream checkpoint has {key}=True"):
        AutoConfig.from_pretrained(checkpoint("tiny-dream", **{key: True}))


def test_registering_again_changes_nothing(checkpoints):
    register_configs()
    config = AutoConfig.from_pretrained(checkpoints / "tiny-llada")
    assert type(config).__module__ == "dllm_plugin.models.configs"


def test_tables_agree():
    assert ARCHITECTURES.keys() == FAMILIES.keys()
    assert (
        FAMILIES["DreamModel"].logits_shift
        and not FAMILIES["LLaDAModelLM"].logits_shift
    )
    for family in FAMILIES.values():
        knows_length = family.absolute_grid or family.block_key is not None
        assert (family.block_length is not None) is knows_length


def test_table_imports_nothing_heavy():
    code = (
        "import sys, dllm_plugin.models; "
        "sys.exit(' '.join({'torch', 'transformers', 'vllm'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
