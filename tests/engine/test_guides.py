"""What the guides add decodes on a real engine as plain loops do: all examples in one process."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import CHECKPOINTS, a_prompt
from guides import copy_package, examples
from processes import SETTINGS, START_SECONDS, environment, result_of
from safetensors.torch import load_file, save_file

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.numbers import llada_quota
from dllm_plugin.reference.proposing import propose
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

pytestmark = pytest.mark.slow

BLOCK, TOKENS, STEPS, THRESHOLD, REACH, MOST = 8, 32, 3, 0.3, 3, 2
GRID_BLOCK = 8  # of the toy family
PROMPTS = [
    a_prompt(11 + 7 * i, i) for i in (0, 2, 3, 6)
]  # no decision of theirs is a close one
ENGINE = SETTINGS | {"enforce_eager": True}
# What each strategy computes after the refresh of a block [low, high) in a canvas to `end`.
WINDOWS: dict[str, Callable[[int, int, int], int]] = {
    "window_cache": lambda low, high, end: min(2 * high - low, end),
    "prefix_cache": lambda low, high, end: end,
    "dual_cache": lambda low, high, end: high,
}


def engine(model: Path, **dllm: Any) -> dict[str, Any]:
    return ENGINE | {"model": str(model), "additional_config": {"dllm": dllm}}


def requests(**numbers: Any) -> list[dict[str, Any]]:
    extra = {f"dllm_{name}": value for name, value in numbers.items()}
    return [
        {"prompt": prompt, "params": {"max_tokens": TOKENS, "extra_args": extra}}
        for prompt in PROMPTS
    ]


def toy_checkpoint(folder: Path) -> Path:
    """tiny-sdar under the toy's names; tensors too."""
    shutil.copytree(CHECKPOINTS / "tiny-sdar", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"], config["block_size"]
    config |= {"architectures": ["ToyForDiffusionLM"], "model_type": "toy"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "transformer."): weights[name] for name in weights
    }
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """Tokens of each prompt by example, from one process with a changed copy of the package."""
    folder = copy_package(tmp_path_factory.mktemp("guides"))
    for example in examples():
        example.apply(folder)
    toy, llada = toy_checkpoint(folder / "tiny-toy"), CHECKPOINTS / "tiny-llada"
    blocks = {"strategy": "block_diffusion", "block_length": BLOCK, "policy": "nearest"}
    window = {
        "strategy": "window_cache",
        "block_length": BLOCK,
        "canvas_length": TOKENS,
    }
    wishes = [
        {
            "engine": engine(llada, **blocks, threshold=THRESHOLD, reach=REACH + 1),
            "requests": requests()
            + requests(reach=REACH)
            + requests(max_unmasked=MOST),
        },
        {
            "engine": engine(llada, **window),
            "requests": requests(policy="low_confidence", steps=STEPS)
            + requests(policy="rightmost", steps=STEPS),
        },
        {"engine": engine(toy), "requests": requests()},
    ]
    variables = {"PYTHONPATH": str(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    result = result_of(
        "guide_script.py",
        json.dumps(wishes),
        seconds=START_SECONDS,
        env=environment(**variables),
        cwd=folder,  # processes that vLLM starts look there first
    )
    # The engine ran in that process, and no module of it came from the checkout.
    assert all(Path(file).is_relative_to(folder) for file in result["files"]), result[
        "files"
    ]
    assert str(folder / "dllm_plugin" / "engine" / "model_state.py") in result["files"]
    names = (
        *("nearest", "nearest, reach", "nearest, at most"),
        *("window_cache", "rightmost", "toy"),
    )
    groups = [
        tokens[i : i + len(PROMPTS)]
        for tokens in result["tokens"]
        for i in range(0, len(tokens), len(PROMPTS))
    ]
    return dict(zip(names, groups, strict=True))


def nearest(
    model: PlainModel, prompt: list[int], reach: int, most: int = BLOCK
) -> list[int]:
    """Block diffusion that takes the first mask, and sure masks among the first `reach`.

    At most `most` in a step.
    """
    text = Text(model, prompt, TOKENS, Rules("block_diffusion", block_length=BLOCK))
    for block in range(text.num_blocks):
        text.append_masks(text.starts[block + 1])
        while left := text.masked_in(block):
            found = propose(text, text.predict()[left], left, 0)
            sure = [p for p in left[:reach] if found[p].confidence > THRESHOLD]
            for p in sorted({left[0], *sure})[:most]:
                text.write(p, found[p])
    return text.answer()


def cached(
    model: PlainModel, prompt: list[int], strategy: str, rightmost: bool
) -> list[int]:
    """Full attention with a refresh per block, by LLaDA's schedule; no batches, no pages."""
    tokens = prompt + [model.mask_id] * TOKENS
    start, stop, slots = len(prompt), len(tokens), {}
    for low in range(start, stop, BLOCK):
        high = low + BLOCK
        first, last = 0, stop
        for step in range(STEPS):
            rows = model.rows_at(first, tokens[first:last], slots)
            left = [p for p in range(low, high) if tokens[p] == model.mask_id]
            rows = rows[[p - first for p in left]]
            rows[:, model.mask_id] = float("-inf")
            sure, best = rows.softmax(-1).max(-1)
            order = sorted(range(len(left)), key=lambda k: (-sure[k], k))
            if rightmost:
                order = list(reversed(range(len(left))))
            for k in order[: llada_quota(BLOCK, STEPS, step)]:
                tokens[left[k]] = int(best[k])
            first, last = low, WINDOWS[strategy](low, high, stop)
    return tokens[start:]


def test_a_policy_with_its_own_number(
    decoded: dict[str, list[list[int]]], plain_models: dict[str, PlainModel]
) -> None:
    """The engine's number where a request names none, and the request's own."""
    model = plain_models["llada"]
    by_reach = [
        [nearest(model, prompt, reach) for prompt in PROMPTS]
        for reach in (REACH + 1, REACH)
    ]
    assert [decoded["nearest"], decoded["nearest, reach"]] == by_reach
    assert (
        by_reach[0]
        != by_reach[1]
        != [nearest(model, prompt, BLOCK) for prompt in PROMPTS]
    )


def test_a_feature(
    decoded: dict[str, list[list[int]]], plain_models: dict[str, PlainModel]
) -> None:
    """It withholds what the policy picks; others in the same steps have no limit."""
    model = plain_models["llada"]
    texts = [nearest(model, prompt, REACH + 1, MOST) for prompt in PROMPTS]
    assert decoded["nearest, at most"] == texts != decoded["nearest"]


def test_a_strategy(
    decoded: dict[str, list[list[int]]], plain_models: dict[str, PlainModel]
) -> None:
    """It is neither of its neighbours: what it computes decides some of the tokens."""
    texts = {
        strategy: [
            cached(plain_models["llada"], prompt, strategy, False) for prompt in PROMPTS
        ]
        for strategy in WINDOWS
    }
    assert decoded["window_cache"] == texts["window_cache"]
    assert texts["window_cache"] not in (texts["prefix_cache"], texts["dual_cache"])


def test_a_policy_with_the_numbers_that_there_are(
    decoded: dict[str, list[list[int]]], plain_models: dict[str, PlainModel]
) -> None:
    """On the new strategy: policies and strategies are chosen apart."""
    model = plain_models["llada"]
    texts = [
        cached(model, prompt, "window_cache", rightmost=True) for prompt in PROMPTS
    ]
    assert decoded["rightmost"] == texts != decoded["window_cache"]


def test_a_model(decoded: dict[str, list[list[int]]]) -> None:
    """Its family's blocks of 8 and threshold of 0.9, on the weights of tiny-sdar."""
    model = PlainModel.load(CHECKPOINTS / "tiny-sdar")
    rules = Rules("block_diffusion", block_length=GRID_BLOCK, on_grid=True)
    texts = [Text(model, prompt, TOKENS, rules) for prompt in PROMPTS]
    assert decoded["toy"] == [decode(text).tokens for text in texts]
