"""SDAR, LLaDA2, Stable-DiffCoder and A2D: recorded decodes in which prompts have blocks, too."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import (
    NEVER,
    EngineRoom,
    at_most,
    forwards,
    free_pages,
    generate,
    num_preemptions,
    one_of_each,
    params,
    token_ids,
)
from test_watched import check_frames_and_early_text

pytestmark = pytest.mark.slow

GOLDENS = Path(__file__).parents[1] / "goldens"
FILES = {
    "sdar": ("sdar_static", "sdar_dynamic", "sdar_sequential"),
    "sdar-moe": ("sdar_moe_static", "sdar_moe_dynamic"),
    "llada2.0": ("llada2_threshold",),
    "stable-diffcoder": ("stable_diffcoder_quota", "stable_diffcoder_threshold"),
    "a2d-qwen3": ("a2d_bd3lm",),
}
EXACT = ("stable-diffcoder", "a2d-qwen3")  # their last block ends with the text
SDAR_POLICIES = {
    "low_confidence_static": "low_confidence",
    "low_confidence_dynamic": "threshold",
    "sequential": "sequential",
}
SDAR_MASK = 282
A2D_EOS = 258
STOPPING = "stopping_criteria_idx"
# Two of the longest recorded blocks; another strategy is A2D's default.
CANVAS = {"canvas_length": 64, "strategy": "block_diffusion"}
Case = dict[str, Any]


@cache
def cases_of(model: str) -> list[Case]:
    """All cases of all files of a checkpoint."""
    return [
        case | {"exact": model in EXACT}
        for name in FILES[model]
        for case in json.loads((GOLDENS / f"{name}.json").read_text())["cases"]
        if not case["id"].startswith("pad")  # refused: the prompt holds the pad token
    ]


def stops_of(case: Case) -> list[int]:
    """LLaDA2's loop takes its EOS as an argument, SDAR's any ids; A2D's is the tokenizer's."""
    settings = case["settings"]
    if "max_new_tokens" in settings:
        return [A2D_EOS]
    stops = settings.get(STOPPING) or [settings.get("eos_id")]
    return [stop for stop in stops if stop is not None]


def answer_of(case: Case) -> list[int]:
    """To the first id that stops: SDAR keeps masks behind it, Stable-DiffCoder repeats it."""
    answer = list(case["output_ids"])
    stops = stops_of(case) if case["exact"] else case["settings"].get(STOPPING, ())
    ends = [i for i, t in enumerate(answer) if t in stops]
    return answer[: ends[0] + 1] if ends else answer


def wish(case: Case) -> Any:
    settings = case["settings"]
    if case["exact"]:
        return exact_wish(case)
    policy = SDAR_POLICIES[settings.get("remasking_strategy", "low_confidence_dynamic")]
    numbers: dict[str, Any] = {
        "dllm_policy": policy,
        "dllm_block_length": settings["block_length"],
    }
    numbers["dllm_steps"] = settings.get("denoising_steps") or settings["steps"]
    if policy == "threshold":
        numbers["dllm_threshold"] = (
            settings.get("threshold") or settings["confidence_threshold"]
        )
    # To the end of the last block, where the reference decodes it whole.
    return params(len(case["output_ids"]), stop_token_ids=stops_of(case), **numbers)


def block_of(case: Case) -> int:
    """The positions of a block."""
    settings = case["settings"]
    return int(settings.get("block_length") or settings["block_size"])


def exact_wish(case: Case) -> Any:
    """Policy and steps per block of a reference whose last block ends with the text."""
    settings = case["settings"]
    block, length = block_of(case), settings.get("gen_length")
    length = length or settings["max_new_tokens"]
    numbers: dict[str, Any] = {"dllm_policy": "low_confidence"}
    if settings.get("threshold") is not None:
        numbers["dllm_policy"] = "threshold"
        numbers["dllm_threshold"] = settings["threshold"]
    steps = -(-settings["steps"] // -(-length // block))
    numbers["dllm_steps"] = settings.get("steps_per_block") or steps
    numbers["dllm_block_length"] = block
    return params(length, stop_token_ids=stops_of(case), **numbers)


def denoising(case: Case) -> int:
    """Forwards of the reference that denoise; ours store a block together with the next one."""
    return sum(one["kind"] in ("denoise", "window") for one in case["forwards"])


def check(case: Case, output: Any) -> None:
    answer = answer_of(case)
    assert token_ids(output) == answer, case["id"]
    ends_inside = len(answer + case["prompt_ids"]) % block_of(case) > 0
    if case["exact"]:
        ends_inside = answer[-1] in stops_of(case)
    if ends_inside:
        # Cut behind a stop token or at `gen_length`: the rest of the block is not decoded.
        assert forwards(output) <= denoising(case), case["id"]
    else:
        assert forwards(output) == denoising(case), case["id"]


@pytest.fixture(scope="module", params=list(FILES))
def model(request: pytest.FixtureRequest) -> str:
    """Which tiny checkpoint."""
    return str(request.param)


def steps_of(case: Case) -> dict[int, int]:
    """At which denoising forward of the reference each position was written last."""
    kinds = ("denoise", "window")
    calls = [one for one in case["forwards"] if one["kind"] in kinds]
    return {p: i for i, one in enumerate(calls, 1) for p, _ in one["new"]}


def traced(llm: Any, cases: list[Case]) -> None:
    """Decode cases in one batch; the trace has a row for each token."""
    wishes, prompts = [wish(case) for case in cases], [c["prompt_ids"] for c in cases]
    for one in wishes:
        one.extra_args["dllm_trace"] = 1
    outputs = generate(llm, prompts, wishes)
    for case, prompt, output in zip(cases, prompts, outputs, strict=True):
        steps, rows = steps_of(case), output.outputs[0].routed_experts
        assert rows.shape == (len(token_ids(output)), 2), case["id"]
        for place, (step, sure) in enumerate(rows, len(prompt)):
            assert step == steps[place] and 0 < sure <= 1, case["id"]
        check(case, output)


def test_together_in_shuffled_order(
    model: str, overlapped: bool, room: EngineRoom
) -> None:
    in_flight = 4 if overlapped else 16
    llm = room.start(model, CANVAS, async_scheduling=overlapped)
    cases = random.Random(in_flight).sample(cases_of(model), len(cases_of(model)))
    with at_most(llm, in_flight):
        traced(llm, cases)


def test_each_alone(model: str, room: EngineRoom) -> None:
    """One of each setting; all of them run together above."""
    llm = room.start(model, CANVAS)
    for case in one_of_each(cases_of(model), lambda case: case["settings"]):
        traced(llm, [case])


@pytest.mark.parametrize("model", ["sdar-moe", "llada2.0"], indirect=True)
def test_frames_and_early_text(model: str, room: EngineRoom) -> None:
    check_frames_and_early_text(room.start(model, CANVAS))


def stopped_at(case: Case, place: int) -> Case:
    """As SDAR's loop records a case that stops at the token in `place` of its answer."""
    first, stop = len(case["prompt_ids"]), case["output_ids"][place]
    place = case["output_ids"].index(stop)
    length = case["settings"]["block_length"]
    end = (first + place) // length * length + length
    answer = case["output_ids"]
    kept = answer[: end - first] + [SDAR_MASK] * (len(answer) - (end - first))
    return case | {
        "output_ids": kept,
        "settings": case["settings"] | {STOPPING: [stop, NEVER]},
        "forwards": [one for one in case["forwards"] if one["q_start"] < end],
    }


def test_stopping_criteria(overlapped: bool, room: EngineRoom) -> None:
    """Made by hand from recorded cases; ids that never come change nothing."""
    llm = room.start("sdar", CANVAS, async_scheduling=overlapped)
    whole = cases_of("sdar")
    cases = [stopped_at(case, len(case["output_ids"]) // 2) for case in whole]
    cases += [
        case | {"settings": case["settings"] | {STOPPING: [NEVER]}}
        for case in whole[:3]
    ]
    assert sum(SDAR_MASK in case["output_ids"] for case in cases) > 5
    assert not any(SDAR_MASK in answer_of(case) for case in cases)
    outputs = generate(llm, [c["prompt_ids"] for c in cases], [wish(c) for c in cases])
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


# Both ways to schedule with one model; the others take turns.
UNDER_PRESSURE = [("sdar", False), ("sdar", True), ("sdar-moe", False)]
UNDER_PRESSURE += [("llada2.0", True), ("stable-diffcoder", False), ("a2d-qwen3", True)]


@pytest.mark.parametrize(
    ("model", "overlapped"), UNDER_PRESSURE, indirect=True, scope="module"
)
def test_preemption_under_pressure(
    model: str, overlapped: bool, room: EngineRoom
) -> None:
    """The prompt's partial block is recomputed with the tokens that it had."""
    llm = room.start(
        model,
        CANVAS,
        async_scheduling=overlapped,
        block_size=32,
        num_gpu_blocks_override=10,
    )
    before, pages, cases = num_preemptions(llm), free_pages(llm), cases_of(model)
    outputs = generate(llm, [c["prompt_ids"] for c in cases], [wish(c) for c in cases])
    for case, output in zip(cases, outputs, strict=True):
        assert token_ids(output) == answer_of(case), case["id"]
    assert num_preemptions(llm) > before
    assert free_pages(llm) == pages


def test_the_context_ends_in_the_prompt_block(
    overlapped: bool, room: EngineRoom
) -> None:
    """The first block reaches to the very end although vLLM counts the prompt as computed."""
    case = next(case for case in cases_of("sdar") if len(case["prompt_ids"]) == 17)
    texts = [
        (case["prompt_ids"] + case["output_ids"])[:length] for length in (45, 46, 47)
    ]
    answers = []
    for context in (48, 64):
        settings = {"async_scheduling": overlapped, "max_model_len": context}
        llm = room.start("sdar", {"canvas_length": 16}, **settings)
        wishes = [
            params(48 - len(text), dllm_policy="low_confidence") for text in texts
        ]
        answers.append([token_ids(output) for output in generate(llm, texts, wishes)])
    assert [len(answer) for answer in answers[0]] == [3, 2, 1]
    assert answers[0] == answers[1]


def test_a_canvas_of_one_block(overlapped: bool, room: EngineRoom) -> None:
    """Each block but the last is stored by a pass of its own."""
    llm = room.start("sdar", {"canvas_length": 16}, async_scheduling=overlapped)
    cases = [
        case for case in cases_of("sdar") if case["settings"]["block_length"] == 16
    ]
    outputs = generate(llm, [c["prompt_ids"] for c in cases], [wish(c) for c in cases])
    for case, output in zip(cases, outputs, strict=True):
        first, last = (
            len(case["prompt_ids"]),
            len(case["prompt_ids"] + case["output_ids"]),
        )
        assert token_ids(output) == answer_of(case), case["id"]
        assert forwards(output) == denoising(case) + last // 16 - first // 16 - 1, case[
            "id"
        ]


def test_blocks_commit_by_themselves_if_many_requests_run(
    model: str, room: EngineRoom
) -> None:
    """The same tokens from fewer positions and more passes."""
    cases, counts = cases_of(model), []
    for options in ({}, {"commit_alone_from": 3}):
        llm = room.start(model, CANVAS | options, async_scheduling=True)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        before = scheduler.num_computed_positions
        outputs = generate(
            llm, [c["prompt_ids"] for c in cases], [wish(c) for c in cases]
        )
        for case, output in zip(cases, outputs, strict=True):
            assert token_ids(output) == answer_of(case), case["id"]
        passes = sum(forwards(output) for output in outputs)
        counts.append((passes, scheduler.num_computed_positions - before))
    (together, all_of_them), (apart, fewer) = counts
    assert together < apart < 1.3 * together
    assert 2 * fewer < all_of_them


def test_random_numbers_and_logprobs(
    model: str, overlapped: bool, room: EngineRoom
) -> None:
    """Behind a partial prompt block the first emitted token is not the first of the canvas."""
    llm = room.start(model, CANVAS, async_scheduling=overlapped)
    hot = {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 50, "logprobs": 2}
    wishes = [
        params(20, **hot),
        params(20, **hot | {"seed": 8}),
        params(20, logprobs=0),
    ]
    prompts = [case["prompt_ids"] for case in cases_of(model)[1:4]]
    together = generate(llm, prompts, wishes)
    for prompt, one, output in zip(prompts, wishes, together, strict=True):
        [alone] = generate(llm, [prompt], one)
        assert token_ids(alone) == token_ids(output)
        assert len(output.outputs[0].logprobs) == 20
        for token, scored in zip(
            token_ids(output), output.outputs[0].logprobs, strict=True
        ):
            assert token in scored and scored[token].logprob <= 0
