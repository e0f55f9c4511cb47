"""Block-causal families through vLLM's loader and forward, against the authors' code."""

import json

import pytest
import torch
from forwards import forward
from safetensors.torch import load_file

TRACES = {
    "sdar_static": "tiny-sdar",
    "sdar_moe_static": "tiny-sdar-moe",
    "llada2_threshold": "tiny-llada2.0",
    "llada21_joint": "tiny-llada2.1",
    "fast_dllm_v2": "tiny-fast-dllm-v2",
    "fast_dllm_v2_tied": "tiny-fast-dllm-v2-tied",
}


def first_call(case: dict, mask_id: int) -> tuple[list[int], list[int]]:
    """Tokens and block ends of the first recorded call."""
    length = case["forwards"][0]["q_len"]
    tokens = (case["prompt_ids"] + [mask_id] * length)[:length]
    settings = case["settings"]
    block = settings.get("block_length") or settings["block_size"]
    return tokens, list(range(block, length + 1, block))


@pytest.mark.parametrize("trace", TRACES)
def test_first_call_equals_reference(trace, load_model, checkpoints, goldens):
    model = load_model(checkpoints / TRACES[trace])
    golden = json.loads((goldens / f"{trace}.json").read_text())
    rows = load_file(goldens / f"{trace}.logits.safetensors")
    assert model.logits_shift is golden["logits_shift"]
    for case in golden["cases"]:
        tokens, stops = first_call(case, golden["mask_id"])
        logits = forward(model, tokens, stops)
        positions = rows[f"{case['id']}/first_logits_rows"].long()
        wanted = rows[f"{case['id']}/first_logits"]
        print(trace, case["id"], (logits[positions] - wanted).abs().max().item())
        torch.testing.assert_close(logits[positions], wanted, atol=5e-4, rtol=0, msg=case["id"])
