"""Time attention of floating canvases, one layer: run and window apart, or in a cascade.

    python benchmarks/attention_windows.py [--model llada]

A canvas of some width has a run and a window, here each half of it. `one` is the context read once,
by one sequence, which no decoding may do; `fa` and `cascade` are what benchmarks/attention.py says.
The last line is JSON.
"""

import argparse
import json
from itertools import product

import torch
from attention import TOLERANCE, measure
from attention_variants import HEADS, Batch, Point, cascade, fa

REQUESTS, CONTEXTS, WIDTHS = (4, 8, 16, 64, 128, 256), (640, 2048), (2, 4, 8, 16, 32)


def time_point(requests: int, context: int, width: int, model: str) -> dict[str, float]:
    """Return the microseconds of each form, checked against the reference."""
    found = {}
    for name, blocks in (("one", 1), ("fa", 2), ("cascade", 2)):
        batch = Batch(
            Point(model, requests, blocks, context, width // blocks), 16, False
        )
        call = cascade(batch) if name == "cascade" else fa(batch, 0)
        call(0)
        some = sorted({0, requests - 1})
        got = batch.out.unflatten(0, (-1, batch.span))[some]
        error = (got.float() - batch.expected(some, False).float()).abs().max().item()
        found[name] = (
            measure(call, len(batch.caches)) if error <= TOLERANCE else float("nan")
        )
        del batch, call
    return found


def main() -> None:
    """Print a row for each load and width, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=HEADS, default="llada")
    model, rows = parser.parse_args().model, []
    print(
        f"{'context':>8} {'requests':>8} {'width':>6} {'one':>8} {'fa':>8} {'cascade':>8}  us"
    )
    for context, requests, width in product(CONTEXTS, REQUESTS, WIDTHS):
        found = time_point(requests, context, width, model)
        rows.append({"context": context, "requests": requests, "width": width} | found)
        times = " ".join(f"{found[name]:>8.1f}" for name in ("one", "fa", "cascade"))
        print(f"{context:>8} {requests:>8} {width:>6} {times}", flush=True)
    device = torch.cuda.get_device_name()
    print(
        json.dumps({"benchmark": "attention windows", "device": device, "rows": rows})
    )


if __name__ == "__main__":
    main()
