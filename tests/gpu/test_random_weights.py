"""What the benchmark multiplies by on a GPU has the size of trained weights."""

import pytest
import torch
from dummies import WHOSE, without_checkpoint, worker_of

from dllm_plugin.commands.bench.engines import stop

LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize("whose", WHOSE)
def test_products_of_an_engine_without_a_checkpoint(whose, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = without_checkpoint(whose, tmp_path)
    layers = dict(worker_of(engine).get_model().named_modules())
    products = [layer for name, layer in layers.items() if name.endswith(LINEAR)]
    assert len(products) >= 8
    for layer in products:
        width = layer.weight.shape[1]
        rows = torch.randn(512, width, device="cuda", dtype=torch.bfloat16)
        deviation = layer(rows)[0].float().std().item()
        assert deviation == pytest.approx(0.02 * width**0.5, rel=0.1)
    stop(engine)
