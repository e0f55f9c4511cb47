"""Nemotron-Labs-Diffusion: the plain loops against the recorded decodes of its authors' code."""

import json
from functools import cache
from typing import Any

import pytest
import torch
from recorded_decodes import (
    GOLDENS,
    NEMOTRON,
    decides_as_recorded,
    model_of,
    nemotron,
)
from safetensors.torch import load_file

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.text import Text

FOLDER = GOLDENS / "checkpoints" / "tiny-nemotron"
Case = dict[str, Any]


@cache
def drafter() -> PlainModel:
    return PlainModel.load(FOLDER, adapter=FOLDER / "linear_spec_lora")


def cases_of(trace: str) -> list[Case]:
    cases = json.loads((GOLDENS / f"{trace}.json").read_text())["cases"]
    # The authors' loop never emits the token that ends thinking; ours does.
    return [c for c in cases if trace == "nemotron_generate" or "think" not in c["id"]]


def text_of(trace: str, case: Case) -> Text:
    read = nemotron(trace, case)
    return Text(
        read.model,
        read.prompt,
        case["settings"]["max_new_tokens"],
        read.rules,
        read.stop,
        drafter=drafter() if case["settings"].get("lora") else None,
    )


@pytest.mark.parametrize("trace", NEMOTRON)
def test_the_plain_loops_reproduce_recorded_decodes(trace: str) -> None:
    for case in cases_of(trace):
        text = text_of(trace, case)
        result = decode(text)
        most = case["settings"]["max_new_tokens"]
        assert result.tokens == case["output_ids"][:most], case["id"]
        assert decides_as_recorded(text, nemotron(trace, case)), case["id"]


@pytest.mark.parametrize("trace", NEMOTRON)
def test_the_plain_model_has_the_recorded_logits(trace: str) -> None:
    rows = load_file(GOLDENS / f"{trace}.logits.safetensors")
    for case in cases_of(trace):
        prompt = case["prompt_ids"]
        logits = model_of("nemotron").rows(prompt, list(range(len(prompt))))
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
