"""LLaDA2.2: recorded decodes, alone and together, and what requests are refused."""

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import (
    CHECKPOINTS,
    EngineRoom,
    forwards,
    generate,
    letters,
    num_preemptions,
    one_of_each,
    params,
    results,
    token_ids,
)
from grammar_requests import wish as wish_grammar
from test_requests_refused import refused
from test_watched import check_frames
from trained_weights import trained

from dllm_plugin.reference.model import PlainModel

Case = dict[str, Any]
NUMBERS = ("threshold", "editing_threshold", "max_post_steps", "steps", "block_length")
DELETE, SPLIT = 300, 301


@cache
def cases() -> list[Case]:
    golden = CHECKPOINTS.parent / "llada22_levenshtein.json"
    found: list[Case] = json.loads(golden.read_text())["cases"]
    return found


def wish(case: Case) -> Any:
    numbers = {f"dllm_{name}": case["settings"][name] for name in NUMBERS}
    stops = case["settings"]["eos_ids"]
    return params(len(case["output_ids"]), stop_token_ids=stops, **numbers)


def num_forwards(case: Case) -> int:
    """Those of the reference, up to the block with the last token."""
    length = case["settings"]["block_length"]
    last = len(case["prompt_ids"]) + len(case["output_ids"]) - 1
    end = (last // length + 1) * length
    return sum(one["kv_len"] <= end for one in case["forwards"])


def check(case: Case, output: Any) -> None:
    assert token_ids(output) == case["output_ids"], case["id"]
    assert forwards(output) == num_forwards(case), case["id"]


def start(room: EngineRoom, is_async: bool = False, **options: Any) -> Any:
    return room.start("llada2.2", {}, is_async, **options)


def small_steps(room: EngineRoom) -> Any:
    """Prompts in parts, few pages, and steps that are launched ahead."""
    return start(
        room,
        True,
        max_num_seqs=4,
        max_num_batched_tokens=5 * 64 + 3,
        block_size=32,
        num_gpu_blocks_override=9,
    )


def shuffled(llm: Any, seed: int, counts: bool = True) -> None:
    some = random.Random(seed).sample(cases(), len(cases()))
    outputs = generate(llm, [c["prompt_ids"] for c in some], [wish(c) for c in some])
    for case, output in zip(some, outputs, strict=True):
        assert token_ids(output) == case["output_ids"], case["id"]
        assert not counts or forwards(output) == num_forwards(case), case["id"]


def test_each_alone(room: EngineRoom) -> None:
    llm = start(room)
    for case in one_of_each(cases(), lambda case: case["settings"]):
        check(case, generate(llm, [case["prompt_ids"]], wish(case))[0])


def test_together_in_shuffled_order(room: EngineRoom) -> None:
    shuffled(start(room), 1)


def test_frames_and_new_weights(room: EngineRoom, tmp_path: Path) -> None:
    """What vLLM reads from a folder, and the old weights again."""
    llm, prompt = start(room), letters(14)
    check_frames(llm)
    [before] = generate(llm, [prompt], params(40))
    old = CHECKPOINTS / "tiny-llada2.2"
    found = []
    for folder in (trained(old, tmp_path), old):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        llm.reset_prefix_cache()
        [output] = generate(llm, [prompt], params(40))
        found.append(token_ids(output))
    assert found[0] != found[1] == token_ids(before)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": 3}, "min_tokens is not supported by LLaDA2.2, whose blocks delete"),
    ({"bad_words": ["a"]}, "bad_words is not supported by LLaDA2.2"),
    ({"allowed_token_ids": [DELETE, SPLIT]}, "leaves nothing to write but"),
    ({"dllm_trace": 1}, "dllm_trace is not supported by LLaDA2.2"),
    ({"dllm_early_text": 1}, "dllm_early_text cannot be combined with policy"),
    ({"dllm_block_length": 16}, "dllm_block_length 16 is not the 32 of LLaDA2.2"),
    ({"dllm_policy": "threshold"}, "policy 'threshold' has no meaning"),
    ({"dllm_max_active_blocks": 2}, "dllm_max_active_blocks 2 exceeds the engine"),
    ({"dllm_template": [5, -1]}, "dllm_template needs a model that sees"),
]


@pytest.mark.parametrize(("asked", "sentence"), REFUSED)
def test_refused(asked: dict[str, Any], sentence: str, room: EngineRoom) -> None:
    llm = start(room)
    with pytest.raises(refused(), match=sentence):
        generate(llm, [letters(5)], params(8, **asked))


def test_logprobs_are_those_of_whole_blocks(room: EngineRoom) -> None:
    """Of the forward that stores a block, and no matter to what is decoded."""
    llm, some = start(room), cases()[:9]
    model = PlainModel.load(CHECKPOINTS / "tiny-llada2.2")
    wishes = [wish(case) for case in some]
    for one in wishes[1::2]:
        one.logprobs = 2
    outputs = generate(llm, [case["prompt_ids"] for case in some], wishes)
    compared = 0
    for case, one, output in zip(some, wishes, outputs, strict=True):
        check(case, output)
        if one.logprobs is None:
            continue
        first, text = len(case["prompt_ids"]), case["prompt_ids"] + case["output_ids"]
        scores = output.outputs[0].logprobs
        assert len(scores) == len(case["output_ids"])
        # The last block may end before it is stored.
        stop = (len(text) - 1) // 32 * 32
        rows = model.predictions(text[:stop], [p // 32 for p in range(stop)])
        for p, row in enumerate(rows[first:].log_softmax(-1), first):
            found = scores[p - first][text[p]]
            assert abs(found.logprob - float(row[text[p]])) < 1e-3
            compared += 1
    assert compared > 60


def test_structured_output_beside_other_texts(room: EngineRoom) -> None:
    """Valid, as alone, and of no weight for texts whose tokens move."""
    llm, some = start(room), cases()[:4]
    wishes = [
        wish_grammar("regex", "[a-z]{3,20}[0-9]", 40),
        wish_grammar("choice", ["yes", "no"], 8, temperature=0.9, seed=3),
        wish_grammar("regex", "[a-f0-9 ]{33}", 40, presence_penalty=0.5),
    ]
    prompts = [letters(5 + 9 * i, i) for i in range(len(wishes))]
    mixed = [case["prompt_ids"] for case in some]
    together = generate(llm, prompts + mixed, wishes + [wish(case) for case in some])
    for case, output in zip(some, together[len(wishes) :], strict=True):
        check(case, output)
    texts = [output.outputs[0].text for output in together]
    assert re.fullmatch("[a-z]{3,20}[0-9]", texts[0])
    assert texts[1] in ("yes", "no") and re.fullmatch("[a-f0-9 ]{33}", texts[2])
    for prompt, one, output in zip(prompts, wishes, together, strict=False):
        assert results(generate(llm, [prompt], one)) == results([output])


@pytest.mark.parametrize("token", [DELETE, SPLIT])
def test_prompt_with_an_edit_is_refused(token: int, room: EngineRoom) -> None:
    llm = start(room)
    with pytest.raises(refused(), match=f"The prompt contains the token {token}, by"):
        generate(llm, [[65, token, 66]], params(8))


def test_prompts_in_parts_with_preemption(room: EngineRoom) -> None:
    """The same texts, with temperature too, whatever a step had room for."""
    prompts = [letters(length, seed=length) for length in (1, 33, 100, 180, 64)]
    wishes = [
        params(40, temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))
    ]
    whole = results(generate(start(room), prompts, wishes))
    llm = small_steps(room)
    before = num_preemptions(llm)
    assert results(generate(llm, prompts, wishes)) == whole
    shuffled(llm, 4)
    assert num_preemptions(llm) > before
