"""Nemotron-Labs-Diffusion: the plain loops against the recorded decodes of its authors' code."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import CAUSAL_BLOCKS, SELF_SPECULATION, Rules
from dllm_plugin.reference.text import Text

GOLDENS = Path(__file__).parents[1] / "goldens"
FOLDER = GOLDENS / "checkpoints" / "tiny-nemotron"
LOOPS = {
    "nemotron_generate": CAUSAL_BLOCKS,
    "nemotron_linear_spec": SELF_SPECULATION,
    "nemotron_ar": SELF_SPECULATION,
}
Case = dict[str, Any]


@cache
def model(adapted: bool = False) -> PlainModel:
    adapter = FOLDER / "linear_spec_lora" if adapted else None
    return PlainModel.load(FOLDER, adapter=adapter)


def cases_of(trace: str) -> list[Case]:
    cases = json.loads((GOLDENS / f"{trace}.json").read_text())["cases"]
    # The authors' loop never emits the token that ends thinking; ours does.
    return [c for c in cases if trace == "nemotron_generate" or "think" not in c["id"]]


def text_of(trace: str, case: Case) -> Text:
    settings, loop = case["settings"], LOOPS[trace]
    by_quota = loop == CAUSAL_BLOCKS and settings["threshold"] is None
    rules = Rules(
        loop,
        "low_confidence" if by_quota else "threshold",
        settings.get("block_length", 1),
        threshold=settings.get("threshold") or 0.0,
        max_thinking_tokens=settings.get("max_thinking_tokens"),
        end_think_token_id=settings.get("end_think_token_id"),
    )
    return Text(
        model(),
        case["prompt_ids"],
        settings["max_new_tokens"],
        rules,
        [settings.get("eos_token_id", 11)],
        drafter=model(adapted=True) if settings.get("lora") else None,
    )


@pytest.mark.parametrize("trace", LOOPS)
def test_the_plain_loops_reproduce_recorded_decodes(trace: str) -> None:
    for case in cases_of(trace):
        text = text_of(trace, case)
        result = decode(text)
        most = case["settings"]["max_new_tokens"]
        assert result.tokens == case["output_ids"][:most], case["id"]
        # The recorded loop goes on after the token that ends the text, and records a token that
        # ends thinking a forward earlier.
        given = case["settings"].get("end_think_token_id")
        for mine, recorded in zip(text.forwards, case["forwards"][1:], strict=False):
            for pair in recorded["new"]:
                assert pair[1] == given or pair in mine.new, case["id"]


@pytest.mark.parametrize("trace", LOOPS)
def test_the_plain_model_has_the_recorded_logits(trace: str) -> None:
    rows = load_file(GOLDENS / f"{trace}.logits.safetensors")
    for case in cases_of(trace):
        prompt = case["prompt_ids"]
        logits = model().rows(prompt, list(range(len(prompt))))
        found = logits[case["first_logits_positions"]]
        wanted = rows[f"{case['id']}/first_logits"]
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=0, msg=case["id"])


def test_self_speculation_writes_the_text_of_causal_decoding() -> None:
    for case in cases_of("nemotron_linear_spec"):
        greedy = case | {"settings": case["settings"] | {"block_length": 1}}
        texts = [text_of("nemotron_linear_spec", one) for one in (case, greedy)]
        drafted, one_by_one = (decode(text) for text in texts)
        assert drafted.tokens == one_by_one.tokens, case["id"]
        assert len(texts[1].forwards) == len(one_by_one.tokens) - 1 or (
            len(one_by_one.tokens) == 1
        )
