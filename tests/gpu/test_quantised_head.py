"""The LM head of 8 bits on a GPU: CUTLASS against the arithmetic in plain torch, and answers."""

from typing import Any

import pytest
import torch
from torch import nn

from diffuplug_bench.eval.scores import MAX_TOKENS, answers, score, start_in_process
from diffuplug_bench.word_problems.generator import problems_of
from dllm_plugin.commands.offline import bundled_options, stop_engine
from dllm_plugin.models.checkpoints.quantised import (
    DTYPES,
    QuantizedHead,
    quantise_rows,
)

KINDS = pytest.mark.parametrize("kind", DTYPES)


def head_of(weight_VH: torch.Tensor, kind: str) -> tuple[nn.Module, QuantizedHead]:
    layer = nn.Module()
    layer.weight = nn.Parameter(weight_VH, requires_grad=False)
    method = QuantizedHead(DTYPES[kind])
    method.process_weights_after_loading(layer)
    return layer, method


@KINDS
@pytest.mark.parametrize("rows", [1, 16, 33, 257])
def test_the_kernel_equals_the_arithmetic(kind: str, rows: int) -> None:
    torch.manual_seed(0)
    weight_VH = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16) * 0.02
    x_TH = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    layer, method = head_of(weight_VH.clone(), kind)
    found = method.apply(layer, x_TH)
    stored_TH, scale_T1 = quantise_rows(x_TH, DTYPES[kind])
    wanted = stored_TH.float() @ layer.weight.float().t()
    wanted = wanted * scale_T1 * layer.weight_scale.t()
    assert found.dtype == torch.bfloat16
    assert (found.float() - wanted).norm() < 0.01 * wanted.norm()
    plain = x_TH.float() @ weight_VH.float().t()
    error = (found.float() - plain).norm() / plain.norm()
    assert error < (0.045 if kind == "fp8" else 0.02)


@KINDS
def test_logits_do_not_depend_on_neighbours(kind: str) -> None:
    torch.manual_seed(1)
    weight_VH = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    layer, method = head_of(weight_VH, kind)
    rows = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    others = 50 * torch.randn(60, 256, device="cuda", dtype=torch.bfloat16)
    beside = method.apply(layer, torch.cat([rows, others]))[:4]
    alone = method.apply(layer, rows)
    assert (beside.float() - alone.float()).norm() < 1e-2 * alone.float().norm()


FORMS = [
    *({"additional_config": {"dllm": {"head_quantization": kind}}} for kind in DTYPES),
    *({"quantization": f"fp8_per_{what}"} for what in ("tensor", "channel")),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_bundled_model_answers_as_well(
    form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    dllm = form.get("additional_config", {}).get("dllm", {})
    options = bundled_options({"strategy": "block_diffusion"} | dllm)
    given = {"dtype": "bfloat16", "quantization": form.get("quantization")}
    engine = start_in_process(options | given)
    problems = problems_of(20)
    found = score(answers(engine, problems, MAX_TOKENS, bar=False), problems)
    stop_engine(engine)
    assert found.accuracy >= 0.95
