"""The yardstick itself: plain block-causal models against the recorded logits."""

import json

import pytest
import torch
from engines import CHECKPOINTS
from plain_models import BlockModel
from safetensors.torch import load_file

GOLDENS = CHECKPOINTS.parent
TRACES = (
    "sdar_static",
    "sdar_moe_static",
    "llada2_threshold",
    "llada21_joint",
)


@pytest.mark.parametrize("trace", TRACES)
def test_first_call_equals_reference(trace: str) -> None:
    golden = json.loads((GOLDENS / f"{trace}.json").read_text())
    rows = load_file(GOLDENS / f"{trace}.logits.safetensors")
    model = BlockModel.load(GOLDENS / golden["checkpoint"])
    assert (model.mask_id, model.shift) == (golden["mask_id"], golden["logits_shift"])
    for case in golden["cases"]:
        length, settings = case["forwards"][0]["q_len"], case["settings"]
        block = settings.get("block_length") or settings["block_size"]
        tokens = (case["prompt_ids"] + [model.mask_id] * length)[:length]
        logits = model.rows(tokens, [position // block for position in range(length)])
        wanted = rows[f"{case['id']}/first_logits"]
        found = logits[rows[f"{case['id']}/first_logits_rows"].long()]
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=0, msg=case["id"])


@pytest.mark.parametrize("name", ["sdar", "sdar-moe", "llada2.0"])
def test_slots_equal_recomputation(name: str) -> None:
    """Blocks written one after the other see what one call with a block mask sees."""
    model = BlockModel.load(CHECKPOINTS / f"tiny-{name}")
    tokens = [(7 * n) % 250 for n in range(12)]
    whole = model.rows(tokens, [n // 4 for n in range(12)])
    slots: dict = {}
    model.rows_at(0, tokens, slots)  # reserves the slots; their content is written over
    for start in range(0, 12, 4):
        visible = {key: tuple(part[:, : start + 4] for part in kv) for key, kv in slots.items()}
        found = model.rows_at(start, tokens[start : start + 4], visible)
        torch.testing.assert_close(found, whole[start : start + 4], atol=1e-4, rtol=0)
