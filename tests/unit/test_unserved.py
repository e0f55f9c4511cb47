"""Checkpoints that would print wrong text as a family of ours, or name no architecture."""

import json
import shutil
from pathlib import Path

import pytest
from command_lines import TINY
from transformers import AutoConfig

from dllm_plugin import default_model
from dllm_plugin.commands import cli
from dllm_plugin.commands.models import check_model
from dllm_plugin.models.checkpoints.unserved import (
    refuse_unserved,
    unknown_keys,
    with_architecture,
)
from dllm_plugin.models.configs import adopt

SDAR, LLADA2, DREAM = "tiny-sdar", "tiny-llada2.0", "tiny-dream"
BY_KEY = [
    ("tiny-sdar-moe", "block_size", 1, "I-DLM"),
    (DREAM, "expand_token_id", 151667, "DreamOn"),
]


@pytest.mark.parametrize(("name", "key", "value", "title"), BY_KEY)
def test_key_is_refused_by_commands_and_at_start(
    name, key, value, title, checkpoint, vllm_config_for
):
    path = checkpoint(name, **{key: value})
    sentence = rf"is {title} \({key}={value!r} in .* docs/support.md lists"
    with pytest.raises(ValueError, match=sentence):
        check_model(str(path))
    with pytest.raises(ValueError, match=sentence):
        vllm_config_for(path)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        ({"model_type": "sdar", "block_size": 1}, "IDLMForCausalLM"),
        ({"model_type": "sdar", "use_regular_causal": True}, "IDLMForCausalLM"),
        ({"model_type": "sdar", "block_size": 4}, "other"),
        ({"model_type": "wedlm", "qk_norm": False}, "WeDLMBiasedForCausalLM"),
        ({"model_type": "wedlm", "qk_norm": True}, "other"),
        ({"model_type": "llada", "block_size": 1}, "other"),
    ],
)
def test_kinds_of_a_model_type_have_architectures(config, architecture):
    found = with_architecture({"architectures": ["other"], **config})
    assert found["architectures"] == [architecture]
    refuse_unserved(found, ["i-dlm-8b"] if architecture == "IDLMForCausalLM" else ())


@pytest.mark.parametrize(
    ("key", "value"),
    [("expert_capacity", 8), ("delete_token_id", 0), ("split_token_id", 300)],
)
def test_some_keys_of_llada22_are_refused(key, value, checkpoint, vllm_config_for):
    path = checkpoint(LLADA2, **{key: value})
    with pytest.raises(ValueError, match="some keys of LLaDA2.2 in config.json but no"):
        vllm_config_for(path)
    path = checkpoint("tiny-llada2.2", expert_capacity=2)
    with pytest.raises(ValueError, match="expert_capacity 2 in config.json is less"):
        vllm_config_for(path)


@pytest.mark.parametrize(
    ("model_type", "name", "title"),
    [
        ("sdar", "i-dlm-8b", "I-DLM"),
        ("sdar", "tiny-idlm", "I-DLM"),
        ("sdar", "uno-qwen3-8b", "UNO"),
        ("Dream", "dreamon-v0-7b", "DreamOn"),
    ],
)
def test_name_is_refused(model_type, name, title):
    with pytest.raises(ValueError, match=rf"is {title} \(by the name {name!r}"):
        refuse_unserved({"model_type": model_type}, [name])


@pytest.mark.parametrize("name", ["sdar-8b-chat-b32", "unofficial-sdar", "midlm"])
def test_other_names_are_served(name):
    refuse_unserved({"model_type": "sdar"}, [name])
    refuse_unserved({"model_type": "llada"}, ["uno", "dreamon", "i-dlm"])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        (LLADA2, "expert_capacity", 0),
        (SDAR, "use_regular_causal", False),
        (SDAR, "block_size", None),
    ],
)
def test_values_without_effect_are_served(name, key, value, checkpoint):
    check_model(str(checkpoint(name, **{key: value})))


def test_bundle_is_refused_by_its_adapter(checkpoint, vllm_config_for):
    path = checkpoint(SDAR)
    (path / "adapter").mkdir()
    check_model(str(path))  # a folder alone shows nothing
    (path / "adapter" / "adapter_config.json").write_text("{}")
    for refused in (lambda: check_model(str(path)), lambda: vllm_config_for(path)):
        with pytest.raises(
            ValueError, match=r"is UNO \(adapter in 'adapter': move the"
        ):
            refused()


def test_token_ids_of_generation_are_read(checkpoint):
    path = checkpoint(DREAM)
    file = path / "generation_config.json"
    file.write_text(json.dumps({"expand_token_id": 5, "delete_token_id": 6}))
    with pytest.raises(ValueError, match=r"is DreamOn \(expand_token_id=5"):
        check_model(str(path))


def test_token_of_the_tokenizer_is_read(checkpoint, vllm_config_for):
    path = checkpoint(DREAM)
    file = path / "tokenizer_config.json"
    file.write_text(file.read_text().replace("<|object_ref_end|>", "<|expand|>"))
    for name in ("tokenizer.json", "vocab.json"):
        text = (path / name).read_text()
        (path / name).write_text(text.replace("<|object_ref_end|>", "<|expand|>"))
    with pytest.raises(ValueError, match=r"is DreamOn \('<\|expand\|>' in its tok"):
        vllm_config_for(path)


def test_published_keys_are_known(checkpoints, registered):
    for path in (*checkpoints.iterdir(), Path(default_model.path())):
        config = AutoConfig.from_pretrained(path)
        adopt(config)
        assert unknown_keys(config) == [], path.name


def test_unknown_keys_are_named_in_one_warning(checkpoint, vllm_config_for, logged):
    vllm_config_for(checkpoint(SDAR, gated_blocks=True, no_value=None, a_scale=2))
    [warning] = [text for text in logged if "does not read" in text]
    assert "a_scale, gated_blocks." in warning


@pytest.mark.parametrize(
    ("block_size", "source", "warned"),
    [(None, None, True), (4, None, False), (None, "Gen-Verse/TraDo-8B", False)],
)
def test_guessed_block_length_is_warned_of(
    block_size, source, warned, checkpoint, vllm_config_for, logged
):
    path = checkpoint(SDAR, block_size=block_size, _name_or_path=source)
    vllm_config_for(path.rename(path.parent / "weights"))
    assert any("how long the blocks" in text for text in logged) is warned


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("llada", '; its model_type suggests {"architectures": ["LLaDAModelLM"]};'),
        ("sdar", '; its model_type suggests {"architectures": ["SDARForCausalLM"]};'),
        ("sdar_moe", '["SDARMoeForCausalLM"]};'),
        ("Fast_dLLM_Qwen", '["Fast_dLLM_QwenForCausalLM"]};'),
        ("mamba", "no architecture; docs/models/README.md"),
        (None, "no architecture; docs/models/README.md"),
    ],
)
def test_no_architecture(
    kind: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text()) | {"model_type": kind}
    del config["architectures"]
    (model / "config.json").write_text(json.dumps(config))
    commands = [["generate", "x", "--model", str(model)]]
    if "suggests" in words:
        commands.append(["serve", str(model)])
    for command in commands:
        assert cli.main(command) == 2
        printed = capsys.readouterr().err
        assert "its config.json names no architecture" in printed
        assert words in printed and printed.count("\n") == 1
