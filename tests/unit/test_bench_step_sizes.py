"""Sizes of steps under full attention: counted from snapshots, timed as sums of parts."""

from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from refusals import resolved
from torch import Tensor

from dllm_plugin.commands.bench import floor
from dllm_plugin.commands.bench.floor import Floor, StepSize
from dllm_plugin.commands.bench.model_shapes import SHAPES, Sizes
from dllm_plugin.commands.bench.request_loop import Answer
from dllm_plugin.commands.bench.step_sizes import forwards_of
from dllm_plugin.commands.verify.plain.full_attention import decode
from dllm_plugin.commands.verify.plain.full_text import FullText, Rules
from dllm_plugin.commands.verify.plain.model import Slots

MASK, VOCABULARY, PROMPT = 500, 512, 30
OPTIONS: dict[str, Any] = {
    "exact": {},
    "rarely": {"full_refresh_every": 3, "refresh_before": 4},
    "answer alone": {"full_refresh_every": 2, "suffix_window": 8},
}


class RandomLogits:
    """Predict at random, so that positions are decided in any order."""

    shift, mask_id = False, MASK

    def predictions(self, tokens: list[int], block: list[int]) -> Tensor:
        raise AssertionError("no loop of full attention asks for this")

    def rows_at(self, start: int, tokens: list[int], slots: Slots) -> Tensor:
        return torch.randn(len(tokens), VOCABULARY)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("strategy", ["dual_cache", "prefix_cache", "semi_autoregressive"])
def test_forwards_are_those_of_the_plain_loop(strategy: str, options: str) -> None:
    """Two canvases of three blocks, in steps that leave one to seven masks each time."""
    given = OPTIONS[options]
    if strategy == "semi_autoregressive":
        given = {k: v for k, v in given.items() if k == "suffix_window"}
    torch.manual_seed(0)
    rules = Rules(strategy=strategy, block_length=8, steps=3, **given)
    text = decode(FullText(RandomLogits(), [1] * PROMPT, 48, rules, canvas_length=24))
    config = resolved(strategy=strategy, block_length=8, canvas_length=24, steps=3, **given)
    answer = Answer([1] * PROMPT, 0.0, sampling={"max_tokens": 48, "extra_args": {}})
    answer.snapshots = list(zip(count(5), snapshots_of(text), strict=False))
    found = forwards_of(answer, config, max_model_len=1024)
    assert [one.step for one in found] == list(range(5, 5 + len(text.passes)))
    expected = [StepSize(one.q_len, one.kv_len, len(one.rows)) for one in text.passes]
    assert [one.size for one in found] == expected
    assert len(expected) == 6 * 3


def snapshots_of(text: FullText) -> list[dict[str, Any]]:
    """Return what the engine would say after each forward: what is decided from its block on."""
    decided, told = dict[int, int](), []
    for one in text.passes:
        base = (min(one.rows) - PROMPT) // 8 * 8
        decided |= dict(one.new)
        ids = [decided.get(PROMPT + base + i, -1) for i in range(8)]
        told.append({"dllm": {"start": base, "ids": np.array(ids, np.int32).tobytes()}})
    return told


def test_time_of_a_step_is_that_of_its_parts() -> None:
    """Between two timed sizes it is interpolated; steps that computed nothing take none."""
    sizes = Sizes.of(SHAPES["tiny"])
    limit = Floor(1e9, {}, {}, 2, {8: 1.0, 16: 2.0}, {4: 0.5, 8: 0.7})
    steps = [StepSize(12, 100, 4), StepSize(), StepSize(32, 50, 6), StepSize(4, 0, 1)]
    gemms, kv = limit.steps_ms(sizes, steps)
    assert gemms == pytest.approx(1.5 + 0.5 + 4.0 + 0.6 + 1.0 + 0.5)
    assert kv == pytest.approx(1e3 * sizes.kv_bytes(150, 2) / 1e9)


def test_sizes_that_are_timed_reach_the_largest() -> None:
    assert floor.grid_up_to(0) == [] and floor.grid_up_to(1) == [1]
    assert floor.grid_up_to(40) == [8, 10, 13, 16, 20, 25, 32, 40]
    grid = floor.grid_up_to(16384)
    assert grid[-1] == 16384 and len(grid) == 33
    assert max(b / a for a, b in zip(grid, grid[1:], strict=False)) <= 1.5
    assert all(size % 128 == 0 for size in grid if size > 256)
    found = floor.measure(
        Sizes.of(SHAPES["tiny"]), floor.Wanted((3,), (20, 9)), "cpu", torch.float32
    )
    assert list(found.gemm_ms) == [3] and list(found.head_ms) == [8, 9]
    assert list(found.layers_ms) == [8, 10, 13, 16, 20] and min(found.layers_ms.values()) > 0
