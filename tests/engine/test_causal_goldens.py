"""Nemotron-Labs-Diffusion: recorded decodes by blocks, by self-speculation and token by token."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import (
    CHECKPOINTS,
    EngineRoom,
    check_prompt_logprobs,
    forwards,
    free_pages,
    generate,
    letters,
    num_preemptions,
    one_of_each,
    params,
    results,
    token_ids,
)
from grammar_requests import same_for_any_drafts

from dllm_plugin.reference.model import PlainModel

GOLDENS = Path(__file__).parents[1] / "goldens"
ADAPTER = str(GOLDENS / "checkpoints" / "tiny-nemotron" / "linear_spec_lora")
BLOCKS = {"strategy": "block_diffusion", "block_length": 32}
DRAFTS = BLOCKS | {"strategy": "self_speculation"}
ADAPTED = DRAFTS | {"draft_adapter": ADAPTER}
Case = dict[str, Any]


@cache
def cases_of(trace: str) -> list[Case]:
    return json.loads((GOLDENS / f"{trace}.json").read_text())["cases"]


@cache
def plain_model(family: str) -> PlainModel:
    return PlainModel.load(CHECKPOINTS / f"tiny-{family}")


def drafted(adapted: bool) -> list[Case]:
    """Cases of self-speculation; the authors never emit the token that ends thinking."""
    cases = [c for c in cases_of("nemotron_linear_spec") if "think" not in c["id"]]
    return [case for case in cases if case["settings"]["lora"] == adapted]


def wish(case: Case, **options: Any) -> Any:
    settings = case["settings"]
    numbers: dict[str, Any] = {"dllm_block_length": settings.get("block_length", 1)}
    if "lora" not in settings and settings.get("threshold", 0) is None:
        numbers["dllm_policy"] = "low_confidence"
    elif settings.get("threshold"):
        numbers["dllm_threshold"] = settings["threshold"]
    for name in ("max_thinking_tokens", "end_think_token_id"):
        if settings.get(name) is not None:
            numbers[f"dllm_{name}"] = settings[name]
    stop = [settings.get("eos_token_id", 11)]
    return params(settings["max_new_tokens"], stop_token_ids=stop, **numbers | options)


def num_forwards(case: Case) -> int:
    """Ours: the prompt's is not counted, and nothing follows the end of the text."""
    calls, answer = case["forwards"][1:], case["output_ids"]
    if "lora" in case["settings"] or "block_length" not in case["settings"]:
        # A text that ends with the prompt's prediction is sent by the next forward.
        return max(len(calls), 1)
    last = len(case["prompt_ids"]) + len(answer) - 1
    needed = [i for i, c in enumerate(calls) if any(p <= last for p, _ in c["new"])]
    return max(needed, default=0) + 1


def check(llm: Any, cases: list[Case], outputs: list[Any]) -> None:
    for case, output in zip(cases, outputs, strict=True):
        most = case["settings"]["max_new_tokens"]
        assert token_ids(output) == case["output_ids"][:most], case["id"]
        assert forwards(output) == num_forwards(case), case["id"]


def alone_and_together(llm: Any, cases: list[Case], every: int = 1) -> None:
    """Decode one case of each setting alone, or some of these, and all in one batch."""
    for case in one_of_each(cases, lambda case: case["settings"])[::every]:
        check(llm, [case], generate(llm, [case["prompt_ids"]], wish(case)))
    mixed = random.Random(len(cases)).sample(cases, len(cases))
    prompts, wishes = [c["prompt_ids"] for c in mixed], [wish(c) for c in mixed]
    check(llm, mixed, generate(llm, prompts, wishes))


@pytest.mark.parametrize("overlapped", [False, True])
def test_blocks(overlapped: bool, room: EngineRoom) -> None:
    llm = room.start("nemotron", BLOCKS, overlapped)
    alone_and_together(llm, cases_of("nemotron_generate"), 3 if overlapped else 1)
    one_by_one = cases_of("nemotron_ar")
    check(
        llm,
        one_by_one,
        generate(
            llm, [c["prompt_ids"] for c in one_by_one], [wish(c) for c in one_by_one]
        ),
    )


@pytest.mark.parametrize("overlapped", [False, True])
def test_self_speculation(overlapped: bool, room: EngineRoom) -> None:
    llm = room.start("nemotron", DRAFTS, overlapped)
    cases = drafted(False) + cases_of("nemotron_ar")
    alone_and_together(llm, cases, 3 if overlapped else 1)
    # Without the adapter other drafts are accepted, and texts are the same.
    cases = drafted(True)
    outputs = generate(llm, [c["prompt_ids"] for c in cases], [wish(c) for c in cases])
    for case, output in zip(cases, outputs, strict=True):
        most = case["settings"]["max_new_tokens"]
        assert token_ids(output) == case["output_ids"][:most], case["id"]
    # Nor does a text under a grammar depend on drafts.
    drafts: dict[str, Any] = {"dllm_block_length": 8}
    drafts |= {"dllm_threshold": 0.7} if overlapped else {}
    same_for_any_drafts(llm, [{"dllm_block_length": 1}, drafts])


def test_drafts_with_an_adapter(room: EngineRoom) -> None:
    alone_and_together(room.start("nemotron", ADAPTED), drafted(True))


def test_texts_do_not_depend_on_drafts(room: EngineRoom) -> None:
    """Greedy or sampled, at any length of drafts: those of causal decoding."""
    llm = room.start("nemotron", DRAFTS)
    prompts = [letters(length, length) for length in (1, 5, 17, 40)]
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "seed": 4, "top_p": 0.8, "top_k": 20, "logprobs": 2},
        {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "bad_words": ["ab"]},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3},
    ]
    for options in wishes:
        texts, scores = [], []
        for numbers in ((1, 0.0), (8, 0.0), (32, 0.0), (8, 0.7)):
            names = {"dllm_block_length": numbers[0], "dllm_threshold": numbers[1]}
            outputs = generate(llm, prompts, params(40, **options, **names))
            texts.append([token_ids(output) for output in outputs])
            scores.append([output.outputs[0].logprobs for output in outputs])
        assert texts.count(texts[0]) == len(texts), options
        if "logprobs" not in options:
            continue
        for found in scores[1:]:
            for mine, theirs in zip(found, scores[0], strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    assert a.keys() == b.keys()
                    assert all(abs(a[i].logprob - b[i].logprob) < 1e-3 for i in a)


IN_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("nemotron", BLOCKS),
    "drafts": ("nemotron", DRAFTS),
    "strides": ("idlm", {"block_length": 8}),
    "windows": ("wedlm", {}),
}


@pytest.mark.parametrize("kind", IN_PARTS)
def test_prompts_in_parts_with_few_pages(kind: str, room: EngineRoom) -> None:
    """Texts are those of an engine with room, also after preemption and from cached pages."""
    family, options = IN_PARTS[kind]
    prompts = [letters(length, seed=length) for length in (1, 33, 64, 100, 150, 2)]
    length = "dllm_window" if family == "wedlm" else "dllm_block_length"
    wish = params(40, logprobs=0, **{length: 8})
    whole = results(generate(room.start(family, options, True), prompts, wish))
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 170,
        "block_size": 32,
        "num_gpu_blocks_override": 9,
    }
    llm = room.start(family, options, True, **settings)
    pages, before = free_pages(llm), num_preemptions(llm)
    for _ in range(2):
        assert results(generate(llm, prompts, wish)) == whole
    assert num_preemptions(llm) > before and free_pages(llm) == pages
    if family == "wedlm":
        return
    scored = generate(llm, prompts, params(40, prompt_logprobs=2, **{length: 8}))
    assert results(scored) == whole
    for prompt, output in zip(prompts, scored, strict=True):
        check_prompt_logprobs(plain_model(family), prompt, 2, output)


def test_the_budget_of_thinking_ends_in_the_text(room: EngineRoom) -> None:
    """At the first token that a causal forward predicts after the budget."""
    llm, prompt = room.start("nemotron", DRAFTS), letters(9, 2)
    names = {"dllm_max_thinking_tokens": 12, "dllm_end_think_token_id": 13}
    for length in (1, 8):
        names["dllm_block_length"] = length
        [output] = generate(llm, [prompt], params(40, **names))
        place = token_ids(output).index(13)
        assert 12 <= place < 12 + length and token_ids(output).count(13) == 1


@pytest.mark.parametrize(
    ("token", "more", "reason"),
    [
        (5000, {}, "but the vocabulary has"),
        (100, {}, "is the mask token"),
        (13, {"logprobs": 1}, "logprobs cannot be combined with"),
    ],
)
def test_wrong_ends_of_thinking(
    token: int, more: dict[str, Any], reason: str, room: EngineRoom
) -> None:
    """A refusal each: such tokens would end the engine, or never end the text."""
    from vllm.exceptions import VLLMValidationError

    llm = room.start("nemotron", DRAFTS)
    asked = {"dllm_max_thinking_tokens": 3, "dllm_end_think_token_id": token}
    with pytest.raises(VLLMValidationError, match=reason):
        generate(llm, [letters(5)], params(16, **asked, **more))
