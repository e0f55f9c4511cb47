"""Recorded decodes of LLaDA2.1 and Fast-dLLM v2 as requests to an engine."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from engines import (
    EngineRoom,
    forwards,
    generate,
    one_of_each,
    params,
    token_ids,
)

GOLDENS = Path(__file__).parents[1] / "goldens"
FILES = {
    "llada2.1": ("llada21_joint",),
    "fast-dllm-v2": ("fast_dllm", "fast_dllm_block_cache"),
    "fast-dllm-v2-tied": ("fast_dllm_tied",),
}
CANVAS = {"llada2.1": {"canvas_length": 64}}
Case = dict[str, Any]


@cache
def cases_of(model: str) -> list[Case]:
    """All cases of all files of a checkpoint, each with its file's name."""
    return [
        case | {"file": name}
        for name in FILES[model]
        for case in json.loads((GOLDENS / f"{name}.json").read_text())["cases"]
    ]


def wish(case: Case) -> Any:
    settings = case["settings"]
    numbers: dict[str, Any] = {"dllm_threshold": settings["threshold"]}
    if "editing_threshold" in settings:
        stop, numbers["dllm_policy"] = settings["eos_id"], "joint_threshold"
        for name in (
            "editing_threshold",
            "max_post_steps",
            "num_to_transfer",
            "block_length",
        ):
            numbers[f"dllm_{name}"] = settings[name]
    else:
        stop, numbers["dllm_sub_block_length"] = (
            settings["stop_token"],
            settings["small_block_size"],
        )
        numbers["dllm_use_block_cache"] = settings["use_block_cache"]
    return params(len(case["output_ids"]), stop_token_ids=[stop], **numbers)


def num_forwards(case: Case) -> int:
    """Ours, exactly, from the calls of the reference."""
    calls = [one for one in case["forwards"] if one["kind"] != "prefill"]
    last = len(case["prompt_ids"]) + len(case["output_ids"]) - 1
    if "editing_threshold" not in case["settings"]:
        # Up to the call that decides the last token; what a commit decides is sent a step later.
        needed = [
            i for i, one in enumerate(calls) if any(p <= last for p, _ in one["new"])
        ][-1]
        return needed + 1 + (calls[needed]["kind"] == "commit")
    # Blocks up to the one with the last token. The check that ends one rides along with the next.
    length = case["settings"]["block_length"]
    end = (last // length + 1) * length
    calls = [one for one in calls if one["kv_len"] <= end]
    behind = zip(calls, calls[1:], strict=False)
    alone = [a for a, b in behind if a["kv_len"] < b["kv_len"] and not a["new"]]
    return len(calls) - len(alone)


def check(case: Case, output: Any) -> None:
    assert token_ids(output) == case["output_ids"], (case["file"], case["id"])
    assert forwards(output) == num_forwards(case), (case["file"], case["id"])


def start(
    room: EngineRoom, model: str, overlapped: bool = False, **options: Any
) -> Any:
    return room.start(
        model, CANVAS.get(model, {}), async_scheduling=overlapped, **options
    )


def trace(llm: Any, case: Case) -> tuple[Any, list[list[list[int]]]]:
    """A decode, and what each step wrote, read from the canvas; empty steps are left out."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    states, engine = worker.model_runner.model_state.states, llm.llm_engine
    mask_id = states.config.mask_token_id
    text = dict(enumerate(case["prompt_ids"]))
    engine.add_request(case["id"], {"prompt_token_ids": case["prompt_ids"]}, wish(case))
    steps, slot, outputs = [], -1, []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        slot = next(iter(states.req_id_to_slot.values()), slot)
        start, row = int(states.start_N[slot]), states.canvas_NC[slot].tolist()
        found = {start + i: token for i, token in enumerate(row) if token != mask_id}
        steps.append([[p, token] for p, token in found.items() if text.get(p) != token])
        text |= found
    return outputs[0], [step for step in steps if step]


def alone_with_traces(llm: Any, model: str) -> None:
    """Decode one case of each setting."""
    for case in one_of_each(cases_of(model), lambda case: case["settings"]):
        output, written = trace(llm, case)
        check(case, output)
        recorded = [sorted(one["new"]) for one in case["forwards"] if one["new"]]
        # Where the text is final, the rest of its block is not decoded; behind a commit it is not
        # sent before the next step, which has written too.
        assert len(written) <= len(recorded) + 1, (case["file"], case["id"])
        assert written[: len(recorded)] == recorded[: len(written)], (
            case["file"],
            case["id"],
        )
        known = dict(pair for step in written for pair in step)
        first = len(case["prompt_ids"])
        assert [known[first + i] for i in range(len(case["output_ids"]))] == case[
            "output_ids"
        ]


def shuffled(llm: Any, model: str, seed: int, counts: bool = True) -> None:
    cases = random.Random(seed).sample(cases_of(model), len(cases_of(model)))
    outputs = generate(llm, [c["prompt_ids"] for c in cases], [wish(c) for c in cases])
    for case, output in zip(cases, outputs, strict=True):
        # A block with a cache of its own starts again when its pages are taken.
        counted = counts or not case["settings"].get("use_block_cache")
        assert token_ids(output) == case["output_ids"], (case["file"], case["id"])
        assert not counted or forwards(output) == num_forwards(case), (
            case["file"],
            case["id"],
        )
