"""Families without recorded decodes: refused, unless the user says that wrong text will do."""

from pathlib import Path

import pytest
from forwards import forward

from diffuplug_bench import model_report
from diffuplug_bench.cli import build_parser
from diffuplug_bench.options import settings_of
from dllm_plugin.commands import cli

ALLOWED = {"additional_config": {"dllm": {"allow_unverified": True}}}


KEYS = {"model_type": "Dream", "architectures": ["DreamForCausalLM"]}
KEYS |= {"block_size": 8, "mask_token_id": 282}
ALLOW = "--allow-unverified"


def test_dream_reasoner(checkpoint, load_model, vllm_config_for, logged):
    """A Qwen3 under Dream's model type."""
    path = checkpoint("tiny-sdar", **KEYS)
    with pytest.raises(ValueError, match="DreamReasoner is not verified.*allow_unver"):
        vllm_config_for(path)
    dllm = vllm_config_for(path, **ALLOWED).additional_config["dllm"]
    assert dllm["strategy"] == "block_diffusion"
    assert dllm["defaults"]["block_length"] == 8
    assert any("DreamReasoner was never compared" in text for text in logged)
    assert forward(load_model(path, **ALLOWED), [5, 6, 7, 8], [4]).isfinite().all()


def test_open_dcoder(checkpoint, load_model, vllm_config_for):
    """Its architecture comes from `--hf-overrides`; without it vLLM serves a Qwen2."""
    keys = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    path = checkpoint("tiny-fast-dllm-v2", **keys)
    ours = {"architectures": ["OpenDCoderForDiffusionLM"], "mask_token_id": 278}
    with pytest.raises(ValueError, match="Open-dCoder is not verified"):
        vllm_config_for(path, hf_overrides=ours)
    config = vllm_config_for(path, hf_overrides=ours, **ALLOWED)
    assert config.additional_config["dllm"]["mask_token_id"] == 278
    model = load_model(path, hf_overrides=ours, **ALLOWED)
    assert forward(model, [5, 6, 7, 8], [4]).isfinite().all()


def test_commands_have_the_option_that_the_sentence_names(
    checkpoint, capsys: pytest.CaptureFixture[str]
):
    path = str(checkpoint("tiny-sdar", **KEYS))
    assert cli.main(["doctor", path]) == 1
    assert "Set allow_unverified to serve it" in capsys.readouterr().out
    assert cli.main(["doctor", path, ALLOW]) == 0
    args = build_parser().parse_args(["step", path, ALLOW])
    assert settings_of(args).dllm(32)["allow_unverified"] is True
    assert cli.main(["watch", "--url", "http://x", ALLOW]) == 2
    assert f"{ALLOW} has no effect with --url" in capsys.readouterr().err


def test_the_report_passes_it_on(
    checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ran = []

    def run_part(words: list[str]) -> model_report.Part:
        ran.append(words)
        return model_report.Part(words, 0, 0.0, "")

    monkeypatch.setattr(model_report, "run_part", run_part)
    path = str(checkpoint("tiny-sdar", **KEYS))
    output = str(tmp_path / "report.md")
    assert cli.main(["report", path, ALLOW, "--output", output]) == 0
    assert len(ran) == 4 and all(ALLOW in words for words in ran)
