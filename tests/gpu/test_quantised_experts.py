"""Layers of quantised experts beside those in bf16, on the same rows: all forms, all mixtures.

Whole models are no judge: a router at a near tie takes other experts after any rounding.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import recorded
import torch
from dummies import worker_of
from quantised import pack, quantise
from test_packed_experts import STRATEGIES, wide_copy
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from diffuplug_bench.step.engine_gemms import experts_of
from dllm_plugin.commands.offline import stop_engine

ONLINE = ("fp8_per_channel", "fp8_per_block")
# Largest relative errors: a GEMM of float8 has 0.04, of 4 bits 0.08 to 0.12, and experts are three.
FORMS = {"float-quantized": 0.12, "pack-quantized": 0.3, **dict.fromkeys(ONLINE, 0.12)}


def outputs(name: str, path: Path, **options: Any) -> Tensor:
    """Return what the experts of each layer make of the same rows."""
    options |= {"dtype": "bfloat16", "max_model_len": 256, "enforce_eager": True}
    engine = recorded.start(str(path), STRATEGIES[name], **options)
    model = worker_of(engine).get_model()
    generator = torch.Generator().manual_seed(0)
    found = []
    for experts in model.modules():
        if isinstance(experts, RoutedExperts):
            rows = torch.randn(64, experts.hidden_size, generator=generator)
            with torch.inference_mode():
                found.append(experts_of(experts, rows.to("cuda", torch.bfloat16))())
    stop_engine(engine)
    return torch.stack(found).float().cpu()


@pytest.mark.parametrize("name", STRATEGIES)
def test_quantised_experts_compute_nearly_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    plain = wide_copy(name, tmp_path / "plain")
    wanted = outputs(name, plain)
    for form, largest in FORMS.items():
        path, options = plain, {"quantization": form}
        if form not in ONLINE:
            path = Path(shutil.copytree(plain, tmp_path / form / plain.name))
            options = {}
        if form == "float-quantized":
            quantise(path, plain.name, "float", experts=True)
        elif form == "pack-quantized":
            pack(path, plain.name, form)
        found = outputs(name, path, **options)
        error = ((found - wanted).norm() / wanted.norm()).item()
        print(f"{name}, {form}: relative error {error:.3f}")
        assert 0 < error < largest, form
