"""Tokenizers of real repository layouts, loaded without remote code as vLLM loads them."""

import builtins
import json
from pathlib import Path

import pytest
from recorded_decodes import WITH_TOKENIZERS
from transformers import AutoTokenizer
from vllm.exceptions import VLLMValidationError

from dllm_plugin.config.request.checks import check_prompt_tokens

pytestmark = pytest.mark.usefixtures("registered")
ALL = pytest.mark.parametrize("name", WITH_TOKENIZERS)
# Nobody recorded what the authors' tokenizers make of texts.
OTHERS = ("tiny-nemotron", "tiny-idlm", "tiny-wedlm", "tiny-llada2.2")


def through_vllm(path: Path):
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(path)


def like_the_repository(path: Path) -> Path:
    """Dream as published: own slow class by auto_map, vocabulary files, no tokenizer.json."""
    (path / "tokenizer.json").unlink()
    (path / "special_tokens_map.json").unlink()
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["tokenizer_class"] = "DreamTokenizer"
    config["auto_map"] = {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}
    added = config["added_tokens_decoder"]
    file.write_text(json.dumps(config))
    tokens = {token["content"]: int(number) for number, token in added.items()}
    (path / "added_tokens.json").write_text(json.dumps(tokens))
    return path


def check(tokenizer, expected: dict) -> None:
    for token, number in expected["special_ids"].items():
        assert tokenizer.convert_tokens_to_ids(token) == number
        assert tokenizer.decode([number], skip_special_tokens=True) == ""
    for text, ids in expected["text"].items():
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text
    for chat in expected["chat"]:
        rendered = tokenizer.apply_chat_template(
            chat["messages"],
            tokenize=False,
            add_generation_prompt=True,
            **chat.get("template_kwargs", {}),
        )
        assert rendered == chat["rendered"]
        assert tokenizer.encode(rendered, add_special_tokens=False) == chat["ids"]


@pytest.fixture
def no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prompt: str = "") -> str:
        raise AssertionError(f"asked on the terminal: {prompt}")

    monkeypatch.setattr(builtins, "input", refuse)


@ALL
@pytest.mark.parametrize("load", [through_vllm, AutoTokenizer.from_pretrained])
def test_tokenizer_of_checkpoint(name, load, checkpoints, goldens, no_questions):
    expected = json.loads((goldens / "tokenizer_checks.json").read_text())[name]
    check(load(checkpoints / name), expected)


@pytest.mark.parametrize("load", [through_vllm, AutoTokenizer.from_pretrained])
def test_dream_repository_layout(load, checkpoint, goldens, no_questions):
    tokenizer = load(like_the_repository(checkpoint("tiny-dream")))
    check(
        tokenizer,
        json.loads((goldens / "tokenizer_checks.json").read_text())["tiny-dream"],
    )
    assert tokenizer.is_fast
    assert tokenizer.mask_token_id == 279 and tokenizer.bos_token_id == 278
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256


@pytest.mark.parametrize("load", [through_vllm, AutoTokenizer.from_pretrained])
def test_dream_ids_of_the_full_vocabulary(load, tmp_path, checkpoint, no_questions):
    """The published ids: 151643 regular entries, then the added tokens up to 151666."""
    path = like_the_repository(checkpoint("tiny-dream"))
    shift = (
        151643 - 256
    )  # the tiny vocabulary has the same added tokens after 256 regular ones
    vocab = json.loads((path / "vocab.json").read_text())
    vocab |= {f"filler{number}": number for number in range(256, 151643)}
    (path / "vocab.json").write_text(json.dumps(vocab))
    added = json.loads((path / "added_tokens.json").read_text())
    added = {token: number + shift for token, number in added.items()}
    (path / "added_tokens.json").write_text(json.dumps(added))
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    decoder = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {
        str(int(n) + shift): token for n, token in decoder.items()
    }
    file.write_text(json.dumps(config))
    tokenizer = load(path)
    assert tokenizer.encode("<|beginoftext|>a<|mask|>") == [151665, 64, 151666]
    assert tokenizer.mask_token_id == 151666 and tokenizer.bos_token_id == 151665
    assert tokenizer.eos_token_id == 151643
    assert tokenizer.decode([151665, 64, 151666], skip_special_tokens=True) == "a"


@pytest.mark.parametrize("load", [through_vllm, AutoTokenizer.from_pretrained])
def test_dense_sdar_repository_layout(load, checkpoint, goldens, no_questions):
    """Code by auto_map for a stock class, and two spellings of the mask in different files."""
    path = checkpoint("tiny-sdar")
    (path / "tokenizer.json").unlink()
    (path / "added_tokens.json").write_text(json.dumps({"<MASK>": 282}))
    file = path / "special_tokens_map.json"
    file.write_text(file.read_text().replace("<|MASK|>", "<MASK>"))
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_qwen2.Qwen2Tokenizer", None]}
    file.write_text(json.dumps(config))
    tokenizer = load(path)
    check(
        tokenizer,
        json.loads((goldens / "tokenizer_checks.json").read_text())["tiny-sdar"],
    )
    assert tokenizer.get_vocab()["<|MASK|>"] == 282


@pytest.mark.parametrize("load", [through_vllm, AutoTokenizer.from_pretrained])
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("tiny-llada2.0", "tokenization_llada2.LLaDA2Tokenizer"),
        ("tiny-fast-dllm-v2", "tokenization.Fast_dLLM_Tokenizer"),
    ],
)
def test_tokenizer_code_of_a_repository_is_not_asked_for(
    load, name, code, checkpoint, goldens, no_questions
):
    path = checkpoint(name)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"auto_map": {"AutoTokenizer": [code, None]}}))
    check(load(path), json.loads((goldens / "tokenizer_checks.json").read_text())[name])


@pytest.mark.parametrize("name", (*WITH_TOKENIZERS, *OTHERS))
def test_a_literal_mask_text_in_a_prompt(name, checkpoints, vllm_config_for):
    """It is refused if the tokenizer makes a mask of it; RND1's knows no such text."""
    config = vllm_config_for(checkpoints / name)
    mask = config.additional_config["dllm"]["mask_token_id"]
    tokenizer = through_vllm(checkpoints / name)
    text = tokenizer.convert_ids_to_tokens(mask)
    if name == "tiny-rnd1":
        assert text is None and mask not in tokenizer.encode("a <|mask|> b")
        return
    with pytest.raises(VLLMValidationError, match="contains the mask token"):
        check_prompt_tokens(tokenizer.encode(f"a {text} b"), mask)
