"""The yardstick itself: plain block-causal models against the recorded logits."""

import json

import pytest
import torch
from engines import CHECKPOINTS
from safetensors.torch import load_file

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

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
    model = PlainModel.load(GOLDENS / golden["checkpoint"])
    assert (model.mask_id, model.shift) == (golden["mask_id"], golden["logits_shift"])
    for case in golden["cases"]:
        length, settings = case["forwards"][0]["q_len"], case["settings"]
        block = settings.get("block_length") or settings["block_size"]
        tokens = (case["prompt_ids"] + [model.mask_id] * length)[:length]
        logits = model.rows(tokens, [position // block for position in range(length)])
        wanted = rows[f"{case['id']}/first_logits"]
        found = logits[rows[f"{case['id']}/first_logits_rows"].long()]
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=0, msg=case["id"])


SDAR = {
    "low_confidence_static": "low_confidence",
    "low_confidence_dynamic": "threshold",
    "sequential": "sequential",
}


@pytest.mark.parametrize(
    "trace",
    [
        "sdar_static",
        "sdar_dynamic",
        "sdar_sequential",
        "sdar_moe_static",
        "llada2_threshold",
    ]
    + ["llada21_joint", "fast_dllm", "fast_dllm_tied"],
)
def test_the_plain_loops_reproduce_recorded_decodes(trace: str) -> None:
    golden = json.loads((GOLDENS / f"{trace}.json").read_text())
    model, steps = PlainModel.load(GOLDENS / golden["checkpoint"]), []
    for case in golden["cases"]:
        settings, given = case["settings"], {}
        size = settings.get("block_length") or settings["block_size"]
        given["threshold"] = settings.get(
            "threshold", settings.get("confidence_threshold", 0.9)
        )
        given["policy"] = SDAR[
            settings.get("remasking_strategy", "low_confidence_dynamic")
        ]
        given["steps"] = settings.get("denoising_steps") or settings.get("steps")
        given["sub_block_length"] = settings.get("small_block_size")
        if "editing_threshold" in settings:
            names = ("editing_threshold", "max_post_steps", "num_to_transfer")
            given |= {name: settings[name] for name in names} | {
                "policy": "joint_threshold"
            }
        stop = {settings.get("eos_id", settings.get("stop_token", -1))}
        loop = "sub_blocks" if trace.startswith("fast") else "block_diffusion"
        bounds = {"block_length": size, "canvas_length": 64, "on_grid": True}
        rules, length = Rules(loop, **bounds, **given), len(case["output_ids"])
        text = Text(model, case["prompt_ids"], length, rules, stop)
        text.watch = steps.append
        assert decode(text).tokens == case["output_ids"], case["id"]
        if loop == "block_diffusion" and "editing_threshold" not in settings:
            recorded = [dict(one["new"]) for one in case["forwards"] if one["new"]]
            found = [one.new for one in steps if one.new]
            assert found == recorded[: len(found)], case["id"]
        steps.clear()


@pytest.mark.parametrize("name", ["sdar", "sdar-moe", "llada2.0"])
def test_slots_equal_recomputation(name: str) -> None:
    """Blocks written one after the other see what one call with a block mask sees."""
    model = PlainModel.load(CHECKPOINTS / f"tiny-{name}")
    tokens = [(7 * n) % 250 for n in range(12)]
    whole = model.rows(tokens, [n // 4 for n in range(12)])
    slots: dict = {}
    model.rows_at(0, tokens, slots)  # reserves the slots; their content is written over
    for start in range(0, 12, 4):
        visible = {
            key: tuple(part[:, : start + 4] for part in kv) for key, kv in slots.items()
        }
        found = model.rows_at(start, tokens[start : start + 4], visible)
        torch.testing.assert_close(found, whole[start : start + 4], atol=1e-4, rtol=0)
