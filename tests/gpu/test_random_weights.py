"""Random weights of the benchmark on a GPU have the size of trained ones."""

import pytest
import torch
from dummies import WHOSE, without_checkpoint, worker_of

from dllm_plugin.commands.offline import stop_engine

LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize("whose", WHOSE)
def test_gemms_of_an_engine_without_a_checkpoint(whose, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = without_checkpoint(whose, tmp_path)
    layers = dict(worker_of(engine).get_model().named_modules())
    gemms = [layer for name, layer in layers.items() if name.endswith(LINEAR)]
    assert len(gemms) >= 8
    for layer in gemms:
        width = layer.weight.shape[1]
        rows = torch.randn(512, width, device="cuda", dtype=torch.bfloat16)
        deviation = layer(rows)[0].float().std().item()
        assert deviation == pytest.approx(0.02 * width**0.5, rel=0.1)
    stop_engine(engine)
