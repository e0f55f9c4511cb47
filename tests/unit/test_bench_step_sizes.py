"""Sizes of steps under full attention: counted from snapshots, timed as sums of parts."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import resolved
from torch import Tensor

from diffuplug_bench.model_shapes import SHAPES, Sizes
from diffuplug_bench.request_loop import Answer, Arrival, Run
from diffuplug_bench.serving.requests import void_share
from diffuplug_bench.step import floor, measure
from diffuplug_bench.step.counts import Count, counting
from diffuplug_bench.step.floor import Floor, StepSize
from diffuplug_bench.step.sizes import Forward, forwards_of, sizes_of
from dllm_plugin.config.carriers import Snapshot
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Slots, Text

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
        slots["first layer"] = (torch.empty(0), torch.empty(0))
        return torch.randn(len(tokens), VOCABULARY)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "strategy", ["dual_cache", "prefix_cache", "semi_autoregressive"]
)
def test_forwards_are_those_of_the_plain_loop(strategy: str, options: str) -> None:
    """Two canvases of three blocks, in steps that leave one to seven masks each time."""
    given = OPTIONS[options]
    if strategy == "semi_autoregressive":
        given = {k: v for k, v in given.items() if k == "suffix_window"}
    torch.manual_seed(0)
    sizes = {"block_length": 8, "canvas_length": 24, "steps": 3}
    rules = Rules(strategy, "low_confidence", **sizes, **given)
    text = Text(RandomLogits(), [1] * PROMPT, 48, rules)
    decode(text)
    config = resolved(
        strategy=strategy, block_length=8, canvas_length=24, steps=3, **given
    )
    answer = Answer([1] * PROMPT, 0.0, sampling={"max_tokens": 48, "extra_args": {}})
    answer.snapshots = list(zip(count(5), snapshots_of(text), strict=False))
    found = forwards_of(answer, config, max_model_len=1024)
    assert [one.step for one in found] == list(range(5, 5 + len(text.forwards)))
    expected = [StepSize(one.length, one.keys, len(one.rows)) for one in text.forwards]
    assert [one.size for one in found] == expected
    assert len(expected) == 6 * 3


def snapshots_of(text: Text) -> list[Snapshot]:
    """Return what the engine would say after each forward: what is decided from its block on."""
    decided, told = dict[int, int](), list[Snapshot]()
    for one in text.forwards:
        base = (min(one.rows) - PROMPT) // 8 * 8
        decided |= dict(one.new)
        ids = [decided.get(PROMPT + base + i, -1) for i in range(8)]
        told.append(Snapshot("r", len(told), base, base, ids, [None] * 8))
    return told


def test_what_shares_a_step_is_counted_in_the_timed_run() -> None:
    """The second run's requests take turns, one a step; nothing is computed in some steps."""
    timed = [Count(), Count(200, 2), Count(64, 2), Count(), Count(132, 2), Count(32, 0)]
    forwards = [
        Forward(at, StepSize(n, 130, rows))
        for at, (n, rows) in enumerate(
            [(100, 32), (100, 32), (32, 20), (32, 10), (100, 4)]
        )
    ]
    found = sizes_of(timed, forwards)
    assert [size.positions for size in found] == [200, 64, 132, 32]
    assert [size.keys for size in found] == [260, 260, 260, 0]
    assert [size.rows for size in found] == [39, 39, 39, 0], "of 19.6 in a forward"


def test_a_message_is_counted_once() -> None:
    """Some messages say nothing, and engines that count no positions say forwards alone."""
    loggers: list[Any] = []
    engine: Any = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=loggers))
    forwards = SimpleNamespace(num_drafts=3)
    with counting(engine) as last_count:
        said = SimpleNamespace(cudagraph_stats=None, spec_decoding_stats=forwards)
        loggers[0].record(said, None, mm_cache_stats=None, engine_idx=0)
        assert last_count() == Count(0, 3) and last_count() == Count()
        said.cudagraph_stats = SimpleNamespace(num_unpadded_tokens=96)
        loggers[0].record(said, None)
        loggers[0].log()
        assert last_count() == Count(96, 3)
    assert not loggers


def test_messages_of_steps_that_computed_nothing_are_no_steps() -> None:
    """Every second one is empty: the floor of a step and its time are of as many steps."""
    arrivals = [Arrival(at, 4) for at in (2, 6, 10, 14)]
    answer = Answer([1] * 10, 0.0, arrivals, [1] * 16, finished=True, forwards=8)
    run = Run([answer], [0.1 * i for i in range(16)], [Count(), Count(32, 1)] * 8)
    assert (row := measure._times(run))["steps"] == 4
    assert row["step_ms"] == pytest.approx(200) and row[
        "step_ms_spread"
    ] == pytest.approx([200] * 2)
    assert row["steps_per_second"] == pytest.approx(5)
    run.counts = [Count()] * 16  # of an engine that counts no positions
    assert (
        measure._times(run)["step_ms"] == pytest.approx(100)
        and measure._times(run)["steps"] == 8
    )
    # The floor of such a step: that of a forward, and not of half a forward.
    sizes = sizes_of([Count(), Count(32, 1)] * 4, [Forward(0, StepSize(32, 64, 8))])
    limit = Floor(1e9, {}, {}, 2, {32: 100.0}, {8: 20.0})
    kept = row | {"requests": 1, "positions": 32, "step_sizes": sizes}
    found = measure.add_floor(kept, limit, Sizes.of(SHAPES["tiny"]))
    assert found["gemm_ms"] == pytest.approx(120)
    assert found["share_of_floor"] == pytest.approx(found["floor_ms"] / 200)


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
        Sizes.of(SHAPES["tiny"]), floor.Wanted((3,), (20, 9)), "cpu", torch.float32, 2
    )
    assert found.kv_item_bytes == 2
    assert list(found.gemm_ms) == [3] and list(found.head_ms) == [8, 9]
    assert (
        list(found.layers_ms) == [8, 10, 13, 16, 20]
        and min(found.layers_ms.values()) > 0
    )


def test_forwards_for_nothing_are_told() -> None:
    answers = [Answer([1] * 10, 0.0, canvas_positions=25), Answer([1] * 5, 0.0)]
    assert void_share(
        Run(answers, counts=[Count(30, 1), Count(), Count(20, 0)])
    ) == pytest.approx(0.2)
