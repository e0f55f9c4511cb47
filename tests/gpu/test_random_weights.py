"""What the benchmark multiplies by on a GPU has the size of trained weights."""

import pytest
import torch

from dllm_plugin import cli
from dllm_plugin.bench import engines
from dllm_plugin.bench.options import settings_of

LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize("whose", ["ours", "plain vLLM"])
def test_products_of_an_engine_without_a_checkpoint(whose, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    arguments = ["bench", "step", "--shapes", "tiny", "--context", "64", "--enforce-eager"]
    settings = settings_of(cli.build_parser().parse_args(arguments))
    engines.prepare()
    model = engines.find_model(settings, tmp_path)
    if whose == "ours":
        engine = engines.ours(settings, model, 32, 256)
    else:
        engine = engines.autoregressive(settings, model, 256, tmp_path)
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    layers = dict(worker.get_model().named_modules())
    products = [layer for name, layer in layers.items() if name.endswith(LINEAR)]
    assert len(products) >= 8
    for layer in products:
        width = layer.weight.shape[1]
        rows = torch.randn(512, width, device="cuda", dtype=torch.bfloat16)
        deviation = layer(rows)[0].float().std().item()
        assert deviation == pytest.approx(0.02 * width**0.5, rel=0.1)
    engines.stop(engine)
