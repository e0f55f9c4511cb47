"""Simulate what widths of each request's own would bring over one width for all.

    python benchmarks/widths_per_request.py [--costs MAP.json] [--acceptance 0.91:2.5] [--shifted]

Requests decode for ever on floating canvases. Each has an ease, which says how its masks are
accepted and changes from step to step; the device is supposed to know it exactly, which confidences
of the step before cannot tell. The choice is greedy: of each request the decided run is fed,
and of all masks those that are likeliest to be accepted, as many as bring the most tokens per time.
Steps of mixed lengths are taken to cost what steps of one width do.

Costs are those of a JSON line of ``diffuplug bench map``, or else the model's.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dllm_plugin.commands.forecast import read_acceptance
from dllm_plugin.decoding.step_costs import READS, Costs, MeasuredCosts, StepCosts
from dllm_plugin.decoding.widths import WIDTHS

CANVAS, STEPS, WARMUP = 64, 400, 50
MODEL = Costs(4.6, 128, 0.022, 1.2e-5, READS)  # ms, Dream-7B shapes on an H200, rounded
FADES = 1 / 8  # of an ease in a step
CHOICES = 33  # numbers of masks that are tried in a step


class Load(NamedTuple):
    """Hold what is simulated.

    context   tokens of each request
    shifted   whether the row of a decided position predicts the next one
    spread    deviation of the logarithm of lambda between requests and steps
    """

    requests: int
    context: int
    p0: float
    lam: float
    shifted: bool
    spread: float


def read_costs(line: dict) -> MeasuredCosts:
    """Return the costs that a map measured, as a scheduler has them."""
    least = min(step["context"] for step in line["steps"])
    steps = {(s["requests"], s["width"], s["context"]): s["ms"] for s in line["steps"]}
    added = [
        (ms - steps[n, w, least]) / (n * (context - least) * (READS if w > 1 else 1))
        for (n, w, context), ms in steps.items()
        if context > least and n >= 32
    ]
    per_key = max(float(np.median(added)), 0.0) if added else 0.0
    empty: dict[int, list[float]] = {}
    for (n, w, context), ms in steps.items():
        if context == least:
            keys = n * context * (READS if w > 1 else 1)
            empty.setdefault(n * w, []).append(ms - per_key * keys)
    positions = sorted(empty)
    ms = np.maximum.accumulate([np.median(empty[n]) for n in positions]).tolist()
    return MeasuredCosts(positions, ms, per_key, READS, {})


class Canvases:
    """Hold what is decided behind the committed text of each request, and its ease."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load, self.rng = load, np.random.default_rng(seed)
        self.done = np.zeros((load.requests, CANVAS), bool)
        self.ease = self.rng.standard_normal(load.requests)

    def chances(self) -> np.ndarray:
        """Return with what probability each mask is accepted; zero where none is."""
        spread = self.load.spread
        # The mean of lambda stays that of the load.
        lam = self.load.lam * np.exp(spread * self.ease - spread**2 / 2)[:, None]
        rank = np.cumsum(~self.done, axis=1) - 1
        return np.where(self.done, 0.0, self.load.p0 * np.exp(-rank / lam))

    def runs(self) -> np.ndarray:
        """Return how many leading positions are decided."""
        return np.where(self.done.all(1), CANVAS, (~self.done).argmax(1))

    def step(self, fed: np.ndarray) -> int:
        """Feed so many positions of each request; return how many tokens were committed."""
        run, column = np.minimum(self.runs(), fed), np.arange(CANVAS)
        rows = fed + self.load.shifted
        seen = (~self.done) & (column < rows[:, None]) & (fed > 0)[:, None]
        take = seen & (self.rng.random(seen.shape) < self.chances())
        none = np.flatnonzero(~take.any(1) & seen.any(1))
        take[none, seen[none].argmax(1)] = True
        self.done |= take
        moved = column + run[:, None]
        kept = np.take_along_axis(self.done, np.minimum(moved, CANVAS - 1), 1)
        self.done = kept & (moved < CANVAS)
        fresh = self.rng.standard_normal(len(self.ease))
        self.ease = np.sqrt(1 - FADES) * self.ease + np.sqrt(FADES) * fresh
        return int(run.sum())


def step_ms(costs: StepCosts, load: Load, fed: np.ndarray) -> float:
    """Return the time of a step that computes so many positions of each request."""
    requests, total = int((fed > 0).sum()), int(fed.sum())
    # Widths differ, so the number of positions stands for a width of one; contexts are read again
    # where there is a window behind a run.
    reads = READS if total > requests else 1.0
    return (
        costs.step(total, 1, 0)
        + costs.step(1, 1, round(load.context * requests * reads))
        - (costs.step(1, 1, 0))
    )


def uniform(costs: StepCosts, load: Load, width: int, seed: int = 0) -> float:
    """Return the tokens per second of one width for all."""
    canvases, fed = Canvases(load, seed), np.full(load.requests, width)
    tokens = [canvases.step(fed) for _ in range(STEPS)]
    return 1000 * float(np.mean(tokens[WARMUP:])) / step_ms(costs, load, fed)


def own(costs: StepCosts, load: Load, seed: int = 0) -> tuple[float, float]:
    """Return the tokens per second of widths of each request's own, and their mean."""
    canvases, tokens, times, widths = Canvases(load, seed), 0, 0.0, 0.0
    for i in range(STEPS):
        fed = best_widths(costs, canvases)
        ms, committed = step_ms(costs, load, fed), canvases.step(fed)
        if i >= WARMUP:
            tokens, times, widths = tokens + committed, times + ms, widths + fed.mean()
    return 1000 * tokens / times, widths / (STEPS - WARMUP)


def best_widths(costs: StepCosts, canvases: Canvases) -> np.ndarray:
    """Return how many positions of each request bring the most tokens per time."""
    load, run, chance = canvases.load, canvases.runs(), canvases.chances()
    # A window reaches to a mask, so what is decided in between is computed again with it.
    price = np.arange(CANVAS)[None, :] + 1 - load.shifted
    order = np.argsort(-chance, axis=None)[: int((chance > 0).sum())]
    gained = np.cumsum(chance.ravel()[order])
    best, found = 0.0, np.maximum(run, 1)
    for count in np.unique(np.geomspace(1, len(order), CHOICES).astype(int)):
        wide = np.zeros(chance.shape, bool)
        wide.ravel()[order[:count]] = True
        fed = np.maximum(np.where(wide, price, 0).max(1), np.maximum(run, 1))
        # Each token is computed once more when it is decided, except where a window has no run.
        masks = int((fed - run).sum())
        total = np.full(1, masks + round(gained[count - 1]))
        reads = READS if total[0] > load.requests else 1.0
        keys = round(load.context * load.requests * reads)
        ms = (
            costs.step(int(total[0]), 1, 0)
            + costs.step(1, 1, keys)
            - costs.step(1, 1, 0)
        )
        if gained[count - 1] / ms > best:
            best, found = gained[count - 1] / ms, fed
    return found


def main() -> None:
    """Print both beside each other, for requests that are alike and for others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--costs", type=Path, help="a JSON line of bench map (default: the model)"
    )
    parser.add_argument("--acceptance", default="0.91:2.5")
    parser.add_argument("--requests", default="8,64,128,256")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--shifted", action="store_true", help="as Dream's rows")
    args = parser.parse_args()
    p0, lam = read_acceptance(args.acceptance)
    costs = (
        MODEL if args.costs is None else read_costs(json.loads(args.costs.read_text()))
    )
    widths = [w for w in WIDTHS if 1 + (not args.shifted) <= w <= 32]
    print(
        f"{'requests':>8} {'spread':>6} {'one width':>10} {'width':>5} {'own':>8} {'mean':>6} gain"
    )
    for n in map(int, args.requests.split(",")):
        for spread in (0.0, 0.5, 1.0):
            load = Load(n, args.context, p0, lam, args.shifted, spread)
            rate, width = max((uniform(costs, load, width), width) for width in widths)
            mine, mean = own(costs, load)
            print(
                f"{n:>8} {spread:>6.1f} {rate:>10.0f} {width:>5} {mine:>8.0f} {mean:>6.2f} "
                f"{mine / rate - 1:+.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
