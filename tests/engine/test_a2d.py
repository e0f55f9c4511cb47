"""A2D: mdlm's recorded decodes, the pad token, templates, and pages of prompts with blocks."""

import json
import random
from pathlib import Path
from typing import Any

import test_grid_goldens as grid
from engines import (
    EngineRoom,
    a_prompt,
    forwards,
    generate,
    letters,
    params,
    token_ids,
)
from test_grid_prefix import hits
from test_requests_refused import refusal

GOLDENS = Path(__file__).parents[1] / "goldens"
MODEL, PAD = "a2d-qwen3", 256
BLOCKS = {"strategy": "block_diffusion", "block_length": 8}


def cases() -> list[grid.Case]:
    """All cases of mdlm."""
    found = json.loads((GOLDENS / "a2d_mdlm.json").read_text())["cases"]
    return [case | {"exact": True} for case in found]


def check(case: grid.Case, output: Any) -> None:
    assert token_ids(output) == case["output_ids"], case["id"]
    assert forwards(output) == case["num_forwards"], case["id"]


def wish(case: grid.Case) -> Any:
    one = grid.exact_wish(case)
    one.stop_token_ids = []  # the loop does not end at EOS
    return one


def test_mdlm(overlapped: bool, room: EngineRoom) -> None:
    """Each alone, and all in shuffled order; the default strategy."""
    llm = room.start(MODEL, {}, async_scheduling=overlapped)
    for case in cases():
        [output] = generate(llm, [case["prompt_ids"]], wish(case))
        check(case, output)
    many = random.Random(1).sample(cases(), len(cases()))
    wishes = [wish(case) for case in many]
    outputs = generate(llm, [case["prompt_ids"] for case in many], wishes)
    for case, output in zip(many, outputs, strict=True):
        check(case, output)


def test_text_after_a_gap_and_a_pad_are_ordinary_in_mdlm(room: EngineRoom) -> None:
    """A gap is filled as if the given tokens had been decided before."""
    llm, prompt = room.start(MODEL, {}), [*letters(9), PAD, *letters(5, 1)]
    template = [-1] * 6 + letters(4, 2)
    one = params(6, dllm_template=template, dllm_steps=3)
    [output] = generate(llm, [prompt], one)
    assert len(token_ids(output)) == 6 and forwards(output) == 3


def test_a_chat_does_not_think_unless_asked(room: EngineRoom) -> None:
    """As dLLM renders the template."""
    llm, checks = room.start(MODEL, {}), GOLDENS / "tokenizer_checks.json"
    chats = json.loads(checks.read_text())[f"tiny-{MODEL}"]["chat"]
    [quiet] = [chat for chat in chats if "template_kwargs" in chat]
    [output] = llm.chat(quiet["messages"], params(2), use_tqdm=False)
    assert output.prompt_token_ids == quiet["ids"]
    asked = {"enable_thinking": True}
    [output] = llm.chat(
        quiet["messages"], params(2), chat_template_kwargs=asked, use_tqdm=False
    )
    assert len(output.prompt_token_ids) < len(quiet["ids"])


def test_no_text_holds_a_pad_token(room: EngineRoom) -> None:
    """The reference hides it from later blocks; an answer ends at one."""
    llm = room.start(MODEL, BLOCKS | {"canvas_length": 16})
    message = refusal(llm, [5, PAD, 6], params(4))
    assert f"pad token (id {PAD})" in message and "hides" in message
    pads = params(12, allowed_token_ids=[PAD], dllm_steps=8)
    [output] = generate(llm, [letters(9)], pads)
    assert token_ids(output) == [PAD]


def texts(remainder: int, count: int) -> list[list[int]]:
    """Prompts with a common start, whose lengths leave this remainder."""
    found = []
    for i in range(count):
        end = a_prompt(8 * (1 + i % 3) + remainder, i)
        found.append(a_prompt(72, 3) + end)
    return found


def test_pages_are_shared_between_prompts_of_equal_remainder(
    overlapped: bool, room: EngineRoom
) -> None:
    """Keys of a page depend on tokens after it, to the end of the block that it cuts."""
    prompts = [*texts(0, 4), *texts(3, 4), *texts(5, 4)]
    # The first tokens after the second page decide what that page holds.
    prompts += [prompt[:64] + [7] + prompt[65:] for prompt in prompts]
    one, answers, found = params(20, dllm_steps=4), [], []
    options = BLOCKS | {"canvas_length": 16}
    for caching in (False, True):
        llm = room.start(
            MODEL,
            options,
            async_scheduling=overlapped,
            block_size=32,
            enable_prefix_caching=caching,
        )
        before = hits(llm)
        outputs = []
        for prompt in prompts:
            outputs += generate(llm, [prompt], one)
        answers.append([token_ids(output) for output in outputs])
        found.append(hits(llm) - before)
    assert answers[0] == answers[1]
    # Of four prompts of a remainder three find both pages. Then all four do if blocks end with
    # pages; else the first one finds only the page that no changed token is seen from.
    assert found == [0, 32 * 2 * (3 * 3 + 4 + 3 + 3) + 2 * 32]


def test_prompts_are_split_where_blocks_end(overlapped: bool, room: EngineRoom) -> None:
    """The first block of a prompt may be shorter than the others."""
    prompts = [a_prompt(length, length) for length in (75, 100, 64)]
    answers = []
    for budget in (None, 48):
        settings = {} if budget is None else {"max_num_batched_tokens": budget}
        llm = room.start(
            MODEL,
            BLOCKS | {"canvas_length": 16},
            async_scheduling=overlapped,
            max_num_seqs=1,
            enable_prefix_caching=False,
            **settings,
        )
        outputs = generate(llm, prompts, params(20, dllm_steps=4))
        answers.append([token_ids(output) for output in outputs])
    assert answers[0] == answers[1]
