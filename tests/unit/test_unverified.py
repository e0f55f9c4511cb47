"""Families without recorded decodes: refused, unless the user says that wrong text will do."""

import pytest
from forwards import forward

ALLOWED = {"additional_config": {"dllm": {"allow_unverified": True}}}


def test_dream_reasoner(checkpoint, load_model, vllm_config_for, logged):
    """A Qwen3 under Dream's model type."""
    keys = {"model_type": "Dream", "architectures": ["DreamForCausalLM"]}
    path = checkpoint("tiny-sdar", block_size=8, mask_token_id=282, **keys)
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
