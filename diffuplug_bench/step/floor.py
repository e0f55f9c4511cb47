"""Measure the lower bound of a step's time: its GEMMs alone, plus reading its bytes of KV.

All GEMMs of one forward (merged QKV, output, merged gate and up, down per layer, LM
head over every position) run back to back, on CUDA as one graph. Every layer has its own weights,
so that no cache holds them. Shapes: M positions, K inputs, N outputs.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffuplug_bench.model_shapes import Sizes
from diffuplug_bench.worker_extension import BOUND
from dllm_plugin.models import forgo_workspace

COPY_BYTES = {"cuda": 2 << 30, "cpu": 1 << 26}
SECONDS = 0.3  # of repetitions per measurement
GROUPS = 10  # of calls, fewer where one call takes longer than its share of the time
# Positions that kernels of large GEMMs compute together: between its multiples time is no line.
TILE, LARGE = 128, 256


class StepSize(NamedTuple):
    """Sum over the requests of a step: positions, their keys, and logits rows."""

    positions: int = 0
    keys: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Floor:
    """List the limits of a step on this device.

    copy_bytes_per_s   bytes read plus bytes written per second by a large copy
    gemm_ms            milliseconds of the GEMMs of a forward, by number of positions
    gemm_tflops        their rate
    kv_item_bytes      bytes of one number in the KV cache
    layers_ms          milliseconds of the layers alone, by positions: for steps of any size
    head_ms            milliseconds of the LM head alone, by logits rows
    """

    copy_bytes_per_s: float
    gemm_ms: dict[int, float]
    gemm_tflops: dict[int, float]
    kv_item_bytes: float
    layers_ms: dict[int, float] = field(default_factory=dict)
    head_ms: dict[int, float] = field(default_factory=dict)

    def step_ms(
        self, sizes: Sizes, positions: int, kv_positions: int
    ) -> tuple[float, float]:
        """Return milliseconds of the GEMMs of `positions`, and of reading `kv_positions` of KV."""
        kv_bytes = sizes.kv_bytes(kv_positions, self.kv_item_bytes)
        return self.gemm_ms[positions], 1e3 * kv_bytes / self.copy_bytes_per_s

    def steps_ms(self, sizes: Sizes, steps: Sequence[StepSize]) -> tuple[float, float]:
        """Return the sums over steps of any size: GEMMs, and reading their keys and values."""
        gemms, keys = 0.0, 0
        for step in steps:
            if step.positions:
                gemms += between(self.layers_ms, step.positions)
                gemms += between(self.head_ms, step.rows)
                keys += step.keys
        kv_bytes = sizes.kv_bytes(keys, self.kv_item_bytes)
        return gemms, 1e3 * kv_bytes / self.copy_bytes_per_s

    def record(self) -> dict[str, Any]:
        """Return the entries of the JSON line."""
        return asdict(self)


# Timed sizes: positions, milliseconds, TFLOP/s.
Timed = list[tuple[int, float, float]]
# Of whole forwards, of layers alone, of the head alone.
Times = tuple[Timed, Timed, Timed]
# Runs all GEMMs of some layers, and counts their operations.
Forward = tuple[Callable[[], Any], float]
Make = Callable[[int], Forward]


@dataclass(frozen=True)
class Wanted:
    """List the sizes that are timed: whole forwards of equal positions and rows, or parts.

    positions   of whole forwards
    most        positions and logits rows of a step at most, if steps differ in size
    """

    positions: tuple[int, ...]
    most: tuple[int, int] | None = None


@torch.inference_mode()
def measure(
    sizes: Sizes, wanted: Wanted, device_name: str, dtype: torch.dtype, kv_item: float
) -> Floor:
    """Time copies and GEMMs; `kv_item`: bytes of one number in the KV cache."""
    forgo_workspace()  # as engines do
    device = torch.device(device_name)
    rate = copy_rate(device_name)
    weights = _weights(sizes, device, dtype)

    def layers(count: int) -> Forward:
        return _forward(sizes, weights[:-1], count)

    def head(count: int) -> Forward:
        return _forward(sizes, weights[-1:], count)

    return floor_of(time_gemms(layers, head, wanted, device), rate, kv_item)


def time_gemms(layers: Make, head: Make, wanted: Wanted, device: torch.device) -> Times:
    """Return the times of whole forwards, of layers, and of the head.

    Args:
        layers: makes the GEMMs of all layers over so many positions.
        head: makes the GEMM of the LM head.
    """

    def whole(count: int) -> Forward:
        forwards = (layers(count), head(count))

        def run() -> None:
            for forward, _ in forwards:
                forward()

        return run, sum(work for _, work in forwards)

    most_positions, most_rows = wanted.most or (0, 0)
    return (
        _timed(whole, sorted(set(wanted.positions)), device),
        _timed(layers, grid_up_to(most_positions), device),
        _timed(head, grid_up_to(most_rows), device),
    )


def floor_of(times: Times, rate: float, kv_item: float) -> Floor:
    """Return the limits from the times of GEMMs; `rate` and `kv_item` as in `Floor`."""
    whole, layers, head = times
    return Floor(
        copy_bytes_per_s=rate,
        gemm_ms=only_ms(whole),
        gemm_tflops={count: tflops for count, _, tflops in whole},
        kv_item_bytes=kv_item,
        layers_ms=only_ms(layers),
        head_ms=only_ms(head),
    )


def _timed(make: Make, counts: Iterable[int], device: torch.device) -> Timed:
    """Time the GEMMs that `make` returns for each number of positions."""
    found = []
    for count in counts:
        run, work = make(count)
        if device.type == "cuda":
            run()  # before the capture, cuBLAS chooses kernels and allocates its workspace
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # a capture cannot take what earlier graphs had
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        milliseconds = 1e3 * _seconds(run, device)
        found.append((count, milliseconds, work / milliseconds / 1e9))
    return found


def only_ms(timed: Timed) -> dict[int, float]:
    """Return milliseconds by positions."""
    return {count: milliseconds for count, milliseconds, _ in timed}


def grid_up_to(most: int) -> list[int]:
    """Return sizes between which time is interpolated: three for each doubling, up to `most`.

    Large sizes are whole tiles, so that a step in between counts as the share of a tile it fills.
    """
    grid = {most} - {0}
    for i in range(64):
        size = round(8 * 2 ** (i / 3))
        if size > LARGE:
            size = round(size / TILE) * TILE
        if size < most:
            grid.add(size)
    return sorted(grid)


def between(times: dict[int, float], count: int) -> float:
    """Interpolate linearly; beyond the largest size time grows in proportion."""
    known = list(times)
    if count > known[-1]:
        return times[known[-1]] * count / known[-1]
    return float(np.interp(count, known, list(times.values())))


def copy_rate(name: str) -> float:
    """Return bytes read plus bytes written per second by a large copy."""
    device = torch.device(name)
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device)


def _weights(
    sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> list[list[Tensor]]:
    """Create weights per layer, then of the head: ``[N, K]``, of experts ``[experts, N, K]``."""

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).uniform_(-BOUND, BOUND)

    layers = []
    for layer in range(sizes.layers):
        shapes: list[tuple[int, ...]] = [*sizes.attention_gemms]
        if layer < sizes.dense_layers:
            shapes += sizes.mlp_gemms(sizes.inner)
        else:
            shapes.append((sizes.experts, sizes.width))  # the router
            shapes += sizes.mlp_gemms(sizes.shared_experts * sizes.expert_inner)
            for shape in sizes.mlp_gemms(sizes.expert_inner):
                shapes.append((sizes.experts, *shape))
        layers.append([random(*shape) for shape in shapes])
    return [*layers, [random(sizes.vocab, sizes.width)]]


def _forward(
    sizes: Sizes, weights: list[list[Tensor]], count: int
) -> tuple[Callable[[], Any], float]:
    """Return a function that runs all GEMMs over `count` positions, and their operations."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    scratch: dict[tuple[Any, ...], Tensor] = {}

    def buffer(role: str, *shape: int) -> Tensor:
        key = (role, *shape)
        if key not in scratch:
            scratch[key] = weights[0][0].new_empty(shape).normal_()
        return scratch[key]

    hit, rows = _experts_hit(sizes, count)
    work = 0.0
    for weight in itertools.chain(*weights):
        used = weight.transpose(-2, -1)
        batch: tuple[int, ...] = (count,)
        if weight.dim() == 3:
            used, batch = used[:hit], (hit, rows)
        inputs = buffer("in", *batch, used.shape[-2])
        calls.append((inputs, used, buffer("out", *batch, used.shape[-1])))
        work += 2.0 * inputs.numel() * used.shape[-1]

    def run() -> None:
        for x, w, out in calls:
            torch.matmul(x, w, out=out)

    return run, work


def _experts_hit(sizes: Sizes, count: int) -> tuple[int, int]:
    """Return how many experts `count` positions reach if routed evenly, and rows of each."""
    if not sizes.experts:
        return 0, 0
    missed = (1 - sizes.experts_per_token / sizes.experts) ** count
    hit = max(1, round(sizes.experts * (1 - missed)))
    return hit, -(-count * sizes.experts_per_token // hit)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of one call, measured in groups that take about `SECONDS` in all."""
    if device.type != "cuda":
        run()
        stamps = [time.perf_counter()]
        while len(stamps) < 4 or stamps[-1] - stamps[0] < SECONDS:
            run()
            stamps.append(time.perf_counter())
        return statistics.median(b - a for a, b in itertools.pairwise(stamps))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def group(calls: int) -> float:
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / calls

    group(1)
    one = group(2)
    groups = min(GROUPS, max(3, round(SECONDS / one)))
    calls = max(1, round(SECONDS / groups / one))
    return statistics.median(group(calls) for _ in range(groups))
