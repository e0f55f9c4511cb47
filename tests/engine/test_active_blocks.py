"""Several blocks at once on any model: the engine equals a plain loop, alone and in a batch."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import test_grid_goldens as grid
from engines import (
    CHECKPOINTS,
    EngineRoom,
    a_prompt,
    generate,
    params,
    results,
    token_ids,
)

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import EDITING, Rules
from dllm_plugin.reference.text import Text

pytestmark = pytest.mark.slow

# Model -> block length, most active blocks, and what its rules add.
SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "sdar": (8, 4, {}),
    "fast-dllm-v2": (16, 3, {"sub_block_length": 4}),
    "llada2.1": (
        16,
        3,
        {"policy": EDITING, "editing_threshold": 0.5, "threshold": 0.7},
    ),
    "llada": (16, 3, {}),
    "dream": (16, 3, {}),
    "sdar-moe": (8, 4, {}),
    "llada2.0": (16, 3, {}),
    "llada-moe": (16, 3, {}),
}
# The others only by the first test.
IN_EVERY_TEST = ("sdar", "fast-dllm-v2", "llada2.1", "llada", "dream")
WHOLE_PROMPTS = ("llada", "dream", "llada-moe")
OTHERS: list[dict[str, Any]] = [
    {},
    {"threshold": 0.5, "block_add_threshold": 0.3},
    {"threshold": 0.3, "block_add_threshold": 0.05, "decoded_token_threshold": 0.5},
    {"max_active_blocks": 2, "threshold": 0.4},
    {"max_active_blocks": 1},
    {"block_add_threshold": 0.0, "decoded_token_threshold": 0.0},
]


@pytest.fixture(scope="module", params=IN_EVERY_TEST)
def model(request: pytest.FixtureRequest) -> str:
    """Which tiny checkpoint."""
    return str(request.param)


@cache
def plain(model: str) -> PlainModel:
    return PlainModel.load(CHECKPOINTS / f"tiny-{model}")


def start(room: EngineRoom, model: str) -> Any:
    size, most, _ = SHAPES[model]
    dllm = {
        "block_length": size,
        "max_active_blocks": most,
        "strategy": "block_diffusion",
    }
    return room.start(model, dllm, async_scheduling=model != "llada")


def rules_of(model: str, i: int) -> Rules:
    size, most, more = SHAPES[model]
    bounds = {"block_length": size, "canvas_length": (most + 1) * size}
    on_grid = model not in WHOLE_PROMPTS
    given = {"max_active_blocks": most} | more | OTHERS[i % len(OTHERS)]
    if model == "llada2.1":
        given |= [
            {},
            {"max_post_steps": 1},
            {"num_to_transfer": 5},
            {"max_post_steps": 0},
        ][i % 4]
    if model.startswith("sdar"):
        given["steps"] = (8, 3, 20)[i % 3]
    return Rules("block_diffusion", on_grid=on_grid, **bounds, **given)


def options(rules: Rules) -> dict[str, Any]:
    """What a request asks for by these rules."""
    names = ["threshold", "steps", "sub_block_length", "max_active_blocks"]
    if rules.max_active_blocks != 1:
        names += ["block_add_threshold", "decoded_token_threshold"]
    if rules.policy == EDITING:
        names += ["editing_threshold", "max_post_steps", "num_to_transfer"]
    values = {f"dllm_{name}": getattr(rules, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def jobs(model: str) -> list[tuple[list[int], int, Rules]]:
    lengths = (3, 16, 29, 41, 32, 17)
    return [
        (a_prompt(n, i + 1), 30 + 9 * i, rules_of(model, i))
        for i, n in enumerate(lengths)
    ]


def decoded(
    model: str, prompt: list[int], tokens: int, rules: Rules, **more: Any
) -> Text:
    text = Text(plain(model), prompt, tokens, rules, max_model_len=256, **more)
    decode(text)
    return text


@pytest.mark.parametrize("model", SHAPES, scope="module", indirect=True)
def test_the_plain_loop(model: str, room: EngineRoom) -> None:
    """Tokens and forwards; more than one block makes a difference."""
    llm, found = start(room, model), jobs(model)
    texts = [decoded(model, *one) for one in found]
    wishes = [params(tokens, **options(rules)) for _, tokens, rules in found]
    outputs = results(generate(llm, [prompt for prompt, _, _ in found], wishes))
    for i, (text, got) in enumerate(zip(texts, outputs, strict=True)):
        assert got == text.result(), (i, text.margin)
    for i in (0, 2):
        assert results(generate(llm, [found[i][0]], wishes[i])) == [outputs[i]]
    prompt, tokens, rules = found[1]
    one = decoded(model, prompt, tokens, replace(rules, max_active_blocks=1))
    assert len(one.forwards) > len(texts[1].forwards)


def test_a_stop_token_and_the_end_of_the_context(model: str, room: EngineRoom) -> None:
    """No block is opened behind a stop token; the last block is cut where the context ends."""
    llm, (prompt, _, rules) = start(room, model), jobs(model)[2]
    stop = decoded(model, prompt, 40, rules).answer()[25]
    ended = decoded(model, prompt, 40, rules, stop={stop})
    long = a_prompt(243, 5)
    cut = decoded(model, long, 40, rules)
    wishes = [
        params(40, stop_token_ids=[stop], **options(rules)),
        params(40, **options(rules)),
    ]
    outputs = results(generate(llm, [prompt, long], wishes))
    assert outputs[0] == ended.result(), ended.margin
    assert outputs[1] == cut.result(), cut.margin
    assert len(cut.answer()) == 13


def test_draws(model: str, room: EngineRoom) -> None:
    llm, found = start(room, model), jobs(model)
    hot = {"temperature": 0.8, "top_p": 0.95, "logprobs": 1}
    wishes = [
        params(33, seed=i, **hot, **options(found[i][2])) for i in range(len(found))
    ]
    together = generate(llm, [prompt for prompt, _, _ in found], wishes)
    for i in (1, 3):
        [alone] = generate(llm, [found[i][0]], wishes[i])
        assert results([alone]) == results([together[i]])
    for output in together:
        scored = output.outputs[0].logprobs
        assert all(t in s for t, s in zip(token_ids(output), scored, strict=True))


def test_one_block_in_an_engine_of_four(room: EngineRoom) -> None:
    """A request for one block takes the steps that it takes in an engine of one."""
    llm = room.start(
        "sdar", {"max_active_blocks": 4, "canvas_length": 64}, async_scheduling=True
    )
    cases = grid.cases_of("sdar")[::2]
    wishes = [grid.wish(case) for case in cases]
    for one in wishes:
        one.extra_args["dllm_max_active_blocks"] = 1
    outputs = generate(llm, [case["prompt_ids"] for case in cases], wishes)
    for case, output in zip(cases, outputs, strict=True):
        grid.check(case, output)
