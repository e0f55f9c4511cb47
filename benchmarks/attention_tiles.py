"""Time tiles and splits of the fused attention kernel, with its own choice as baseline.

    python benchmarks/attention_tiles.py [PAGE]

One line per shape: the choice and its microseconds, then the four best. The constants live in
``dllm_plugin/kernels/paged_attention/kernel.py``.
"""

import sys
from dataclasses import astuple
from itertools import product

import torch
from attention import measure
from attention_variants import HEADS, Batch, Point, fused
from triton.runtime.errors import OutOfResources

from dllm_plugin.kernels.paged_attention.kernel import Tile, choose_splits, choose_tile


def tune(page: int) -> None:
    """Time the fused kernel over tiles (rows, keys, warps, stages) and splits; print the best."""
    shapes = [
        (32, 64, 4, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 128, 8, 3),
        (128, 64, 8, 3),
    ]
    shapes += [(128, 64, 8, 4), (128, 128, 8, 3), (32, 128, 4, 3), (16, 64, 4, 4)]
    units = torch.cuda.get_device_properties(0).multi_processor_count
    grid = [
        *product(HEADS, (1, 16, 64), (1, 4), (1024,)),
        *product(HEADS, (1,), (1,), (8192,)),
    ]
    for point in (Point(*row) for row in grid):
        batch, times = Batch(point, page, True), {}
        group = batch.query.shape[1] // batch.fresh.shape[2]
        chosen = choose_tile(batch.span * group, 2)
        blocks = point.requests * -(-batch.span * group // chosen.rows)
        default = tuple(chosen), choose_splits(blocks * batch.fresh.shape[2], units)
        for shape, splits in {default, *product(shapes, (1, 2, 4, 8, 16))}:
            if splits > 1 and point.requests > 16:
                continue
            call = fused(batch, tile=Tile(*shape), splits=splits)
            try:
                call(0)
            except OutOfResources:  # more shared memory than there is
                continue
            times[shape, splits] = measure(call, len(batch.caches))
        best = sorted(times, key=times.get)[:4]
        shown = [
            f"{shape} x {splits}: {times[shape, splits]:.1f}" for shape, splits in best
        ]
        print(
            *astuple(point),
            f"default {default[0]} x {default[1]}: {times[default]:.1f}",
            end=" | ",
        )
        print(*shown, sep=" | ", flush=True)


if __name__ == "__main__":
    tune(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
