"""DiffuCoder: Dream's architecture, and a token of its own that fills the rest of an answer."""

import shutil
from pathlib import Path

from engines import CHECKPOINTS, EngineRoom, generate, letters, params, token_ids

TURN_END, PAD = (
    258,
    260,
)  # of the tiny vocabulary; 260 is a token that Dream does not use
TEXT = letters(12, 1)


def test_its_padding_ends_a_turn(room: EngineRoom, tmp_path: Path) -> None:
    """In a chat, whose prompt has turns; in plain text it is a token like any other."""
    folder = tmp_path / "DiffuCoder-7B-Instruct"
    shutil.copytree(CHECKPOINTS / "tiny-dream", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("<|object_ref_end|>", "<|dlm_pad|>"))
    llm = room.start("dream", {}, model=str(folder))
    config = llm.llm_engine.vllm_config
    assert config.model_config.architecture == "DreamModel"
    assert config.additional_config["dllm"]["strategy"] == "dual_cache"
    assert config.additional_config["dllm"]["turn_end_token_ids"] == (TURN_END, PAD)
    said = {"logit_bias": {PAD: 100}, "ignore_eos": False}
    prompts = [[*TEXT, TURN_END, *TEXT], TEXT, [*TEXT, TURN_END]]
    wishes = [
        params(20, **said),
        params(20, **said),
        params(20, **said | {"ignore_eos": True}),
    ]
    chat, plain, ignored = generate(llm, prompts, wishes)
    assert token_ids(chat) == [PAD] and chat.outputs[0].finish_reason == "stop"
    assert token_ids(plain) == token_ids(ignored) == [PAD] * 20
