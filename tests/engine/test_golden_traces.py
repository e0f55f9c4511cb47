"""Recorded traces of the D2F reference decoders, token for token and pass for pass."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import at_most, forwards, generate, params, token_ids
from safetensors.torch import load_file

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

GOLDENS = Path(__file__).parents[1] / "goldens"
POLICY = {
    "default": "threshold",
    "neg_entropy": "entropy",
    "margin_confidence": "topk_margin",
}
IN_FLIGHT = (4, 16)


def cases_of(family: str) -> list[dict[str, Any]]:
    return json.loads((GOLDENS / f"d2f_{family}.json").read_text())["cases"]


def logits_of(family: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDENS / f"d2f_{family}.logits.safetensors")


def wish_for(case: dict[str, Any], **options: Any) -> Any:
    settings = case["settings"]
    return params(
        settings["max_new_tokens"],
        stop_token_ids=[case["eos_id"]],
        dllm_block_length=settings["block_size"],
        dllm_threshold=settings["skip_threshold"],
        dllm_block_add_threshold=settings["block_add_threshold"],
        dllm_decoded_token_threshold=settings["decoded_token_threshold"],
        dllm_policy=POLICY[settings.get("sampling_strategy", "default")],
        **options,
    )


def expected(case: dict[str, Any]) -> list[int]:
    """The reference's answer up to its first EOS, where the engine ends."""
    tokens, eos = case["output_ids"], case["eos_id"]
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def plain_text(model: PlainModel, case: dict[str, Any]) -> Text:
    settings = case["settings"]
    rules = Rules(
        "d2f",
        POLICY[settings.get("sampling_strategy", "default")],
        settings["block_size"],
        threshold=settings["skip_threshold"],
        block_add_threshold=settings["block_add_threshold"],
        decoded_token_threshold=settings["decoded_token_threshold"],
    )
    length = settings["max_new_tokens"]
    return Text(model, case["prompt_ids"], length, rules, {case["eos_id"]})


def check(case: dict[str, Any], output: Any) -> None:
    assert token_ids(output) == expected(case), case["id"]
    if case["eos_id"] in case["output_ids"]:
        assert forwards(output) <= case["num_forwards"], case["id"]
    else:
        assert forwards(output) == case["num_forwards"], case["id"]


def test_plain_loop_reproduces_them(
    family: str, plain_models: dict[str, PlainModel]
) -> None:
    """The yardstick of the other files is itself right."""
    model, recorded = plain_models[family], logits_of(family)
    for case in cases_of(family):
        prompt, settings = case["prompt_ids"], case["settings"]
        size = settings["block_size"]
        rows = model.rows(
            prompt + [model.mask_id] * size, [0] * len(prompt) + [1] * size
        )
        index = recorded[f"{case['id']}/first_logits_rows"].long()
        torch.testing.assert_close(
            rows[index], recorded[f"{case['id']}/first_logits"], atol=5e-4, rtol=0
        )
        found = decode(plain_text(model, case))
        assert found.tokens == expected(case), case["id"]


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_together_in_shuffled_order(family: str, in_flight: int, llm: Any) -> None:
    for seed in range(2):
        cases = cases_of(family)
        random.Random(seed).shuffle(cases)
        with at_most(llm, in_flight):
            outputs = generate(
                llm, [c["prompt_ids"] for c in cases], [wish_for(c) for c in cases]
            )
        for case, output in zip(cases, outputs, strict=True):
            check(case, output)


class ForwardSpy:
    """Logits rows of all positions of every forward, read from the served model itself."""

    def __init__(self, llm: Any) -> None:
        worker = (
            llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        )
        self.model = worker.model_runner.model
        self.forwards: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> "ForwardSpy":
        self.handle = self.model.register_forward_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.handle.remove()

    def _note(
        self, model: Any, args: Any, kwargs: dict[str, Any], hidden: torch.Tensor
    ) -> None:
        self.forwards.append(
            (kwargs["positions"].clone(), model.compute_logits(hidden).clone())
        )


def test_each_alone_with_its_first_logits(family: str, llm: Any) -> None:
    recorded = logits_of(family)
    for case in cases_of(family):
        with ForwardSpy(llm) as spy:
            [output] = generate(llm, [case["prompt_ids"]], wish_for(case))
        check(case, output)
        assert len(spy.forwards) == forwards(output) + 1, (
            "the prompt's forward and no other"
        )
        (prompt_at, prompt_rows), (canvas_at, canvas_rows) = spy.forwards[:2]
        rows = dict(zip(prompt_at.tolist(), prompt_rows, strict=True))
        rows |= dict(zip(canvas_at.tolist(), canvas_rows, strict=True))
        index = recorded[f"{case['id']}/first_logits_rows"].tolist()
        torch.testing.assert_close(
            torch.stack([rows[i] for i in index]),
            recorded[f"{case['id']}/first_logits"],
            atol=5e-4,
            rtol=0,
        )
