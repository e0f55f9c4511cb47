"""Time attention of block-causal canvases, one layer: the fused kernel and what vLLM has.

    python benchmarks/attention.py [--full] [--variants fused,fa] [--page 64] [--splits 8]
        [--out results.json]

Every request computes a canvas of 1 to 8 open blocks of 32 (or 16) behind a context; every block
sees the context and the canvas up to its own end. Variants, each in a process of its own:

    fa       one sequence per block on FlashAttention 3 (`unified` layout, pages of 16)
    triton   the same sequences on vLLM's Triton attention
    cascade  cascade attention on FlashAttention 3: context as prefix, canvas as suffix
    fused    the kernel of the `distinct` layout (pages of 64; `fused16`: pages of 16)
    flex     torch's FlexAttention, compiled, on keys that are not paged (few points)

Each is compared with the plain-torch reference before it is timed. A time is the median over
replays of a CUDA graph that calls it on several caches in turn, together larger than the L2 cache,
as the layers of a model are. The floor is the bytes that must move (cached and fresh keys and
values, queries, results) over the copy bandwidth measured in the same run. Results, and what was
expected: benchmarks/reports/attention.md. The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, astuple
from itertools import product
from pathlib import Path

import torch
from attention_variants import Batch, Point, fused

VARIANTS = ("fused", "fused16", "triton", "fa", "cascade", "flex")
MAX_BYTES = 12 << 30  # keys and values of one cache
TOLERANCE = 2e-2


def points(full: bool) -> list[Point]:
    """Return the corners of the grid and what decides about a cascade, or the whole grid."""
    contexts = (256, 512, 1024, 2048, 4096, 8192) if full else (256, 1024, 8192)
    grid = [
        *product(("llada", "dream"), (1, 4, 16, 64, 256), (1, 2, 4, 8), contexts),
        *product(("sdar",), (4, 16, 64), (2, 4), (1024, 4096)),
        *product(("llada",), (4, 8, 16, 64), (2,), (256, 1024, 4096), (16,)),
    ]
    return [p for p in (Point(*row) for row in grid) if p.kv_bytes <= MAX_BYTES]


def measure(call, layers: int) -> float:
    """Return the microseconds of one call."""
    calls = layers * max(1, 16 // layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % layers)
    graph.replay()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return the bytes per second of a copy on the device, read and written bytes counted."""
    source = torch.zeros(1 << 28, device="cuda")
    target = torch.empty_like(source)
    # A kernel: the copy engine, which a graph's copies go to, reaches two thirds of its speed.
    call = measure(lambda _: torch.add(source, 1.0, out=target), 1)
    return 2 * source.nbytes / (call * 1e-6)


def is_gathered(point: Point) -> bool:
    """Return whether `flex` is compiled for this point, which takes some seconds."""
    few = point.requests in (1, 16) and point.blocks in (1, 4) and point.block == 32
    return few and point.kv_bytes <= 1 << 28


def run_variant(name: str, full: bool, page: int, splits: int) -> None:
    """Check and time one variant; print one JSON line per point."""
    distinct = name.startswith("fused")
    build = fused if distinct else globals()[name]
    page = page if name == "fused" else 16
    for point in points(full):
        if name == "flex" and not is_gathered(point):
            continue
        batch = Batch(point, page, distinct)
        call = build(batch, splits) if name == "fa" else build(batch)
        call(0)
        some = sorted({0, point.requests // 2, point.requests - 1})
        got = batch.out.unflatten(0, (-1, batch.span))[some]
        error = (
            (got.float() - batch.expected(some, distinct).float()).abs().max().item()
        )
        row = asdict(point) | {
            "variant": name,
            "error": error if error == error else None,
        }
        if error <= TOLERANCE:  # never true of NaN
            row["us"] = measure(call, len(batch.caches))
        print(json.dumps(row), flush=True)
        del batch, call


def collect(
    variants: list[str], full: bool, page: int, splits: int
) -> tuple[list[dict], dict[str, list[str]]]:
    """Run every variant in a process of its own; return results, and the last words of failures."""
    rows, died = [], {}
    for name in variants:
        command = [sys.executable, __file__, "--child", name, "--page", str(page)]
        command += ["--splits", str(splits)]
        done = subprocess.run(
            command + ["--full"] * full, capture_output=True, text=True
        )
        rows += [
            json.loads(line)
            for line in done.stdout.splitlines()
            if line.startswith("{")
        ]
        if done.returncode:
            died[name] = done.stderr.splitlines()[-3:]
            print(f"{name} died:", *died[name], sep="\n    ")
    return rows, died


def main() -> int:
    """Print the table and the JSON line; 1 if a variant was wrong somewhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--full", action="store_true", help="every shape instead of a subset"
    )
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--page", type=int, default=64, help="page size of `fused`")
    parser.add_argument(
        "--splits", type=int, default=0, help="of `fa`; 0: as it chooses"
    )
    parser.add_argument("--out", type=Path, help="write the JSON line here too")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_variant(options.child, options.full, options.page, options.splits)
        return 0
    variants = options.variants.split(",")
    rows, died = collect(variants, options.full, options.page, options.splits)
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    header = [
        *("model", "reqs", "blocks", "context", "block", "MB", "floor us"),
        *variants,
    ]
    print(*(f"{title:>9}" for title in header))
    times = {
        (row["variant"], *[row[k] for k in Point.__annotations__]): row for row in rows
    }
    for point in points(options.full):
        key = astuple(point)
        cells = [times.get((name, *key), {}) for name in variants]
        shown = [
            f"{c['us']:.1f}" if "us" in c else ("WRONG" if c else "-") for c in cells
        ]
        floor = point.bytes / bandwidth * 1e6
        print(
            *(
                f"{cell:>9}"
                for cell in [*key, f"{point.bytes / 1e6:.1f}", f"{floor:.1f}", *shown]
            )
        )
    summary = {
        "benchmark": "attention",
        "device": device,
        "torch": torch.__version__,
        "splits": options.splits,
        "copy_bytes_per_s": bandwidth,
        "points": [
            asdict(p) | {"bytes": p.bytes, "flops": p.flops}
            for p in points(options.full)
        ],
        "rows": rows,
        "died": died,
    }
    line = json.dumps(summary)
    if options.out:
        options.out.write_text(line)
    print(line)
    return int(bool(died) or any("us" not in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
