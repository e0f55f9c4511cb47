"""Sum up where a step's time goes: group the kernels of a Chrome trace by what launched them.

The model's forward is one CUDA graph per step: its kernels have the correlation id of a
``cudaGraphLaunch``. Of the other kernels, GEMMs are the LM head, collectives of NCCL and vLLM
exchange logits between ranks, and the rest is sampler, policy, plan and the preparation by vLLM's
runner. A refresh of full attention is no such graph: the step that it ran in is left out. Times in
a trace are microseconds.
"""

import re
import statistics
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
GEMM = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|wgmma", re.IGNORECASE)
EXCHANGE = re.compile(r"nccl|cross_device", re.IGNORECASE)
LARGEST = 12


class TooFewForwards(ValueError):
    """Report that a trace has too few forwards in full graphs for a mean."""


class Kernel(NamedTuple):
    """Describe an interval on the device."""

    start: float
    stop: float
    name: str
    group: str  # forward, lm_head, exchange, sampler, copy
    graph: Any  # the graph replay that it belongs to; None if it was launched by itself


@dataclass(frozen=True)
class Summary:
    """List means per step over `steps` whole steps; times are in milliseconds.

    step_ms lasts from the first kernel of a forward to that of the next. The device worked for
    busy_ms and idled for gap_ms. forward_gap_ms is the idle time between kernels of the graph. The
    groups add up to busy_ms unless they overlap.
    """

    steps: int
    step_ms: float
    busy_ms: float
    gap_ms: float
    forward_gap_ms: float
    forward_ms: float
    lm_head_ms: float
    exchange_ms: float  # between ranks, outside of the graph
    sampler_ms: float  # sampler, policy, plan, and the preparation by vLLM's runner
    copy_ms: float
    kernels: float  # launched outside of the graph
    largest: dict[str, float]  # name -> ms, outside of the graph
    forward_kernels: float
    forward_largest: dict[str, float]


def summarise(events: Iterable[dict[str, Any]], most: int) -> Summary:
    """Summarise the steps in the ``traceEvents`` of one device, which are at most `most`.

    Raises TooFewForwards if the trace holds fewer than three replays of a forward, and ValueError
    if it holds more than steps.
    """
    launches, found = set(), []
    for event in events:
        if event.get("ph") != "X":
            continue
        number = event.get("args", {}).get("correlation")
        if event["name"].startswith(("cudaGraphLaunch", "cuGraphLaunch")):
            launches.add(number)
        elif event.get("cat") in ON_DEVICE:
            found.append((event["ts"], event["ts"] + event["dur"], event, number))
    sizes = Counter(number for *_, number in found if number in launches)
    # Graphs that are much smaller, if any, are not the model.
    forwards = {n for n, size in sizes.items() if 2 * size > max(sizes.values())}
    starts: dict[Any, float] = {}
    kernels = []
    for start, stop, event, number in sorted(found, key=lambda item: item[0]):
        graph = number if number in forwards else None
        group = _group(event, graph is not None)
        kernels.append(Kernel(start, stop, event["name"], group, graph))
        if graph is not None:
            starts.setdefault(graph, start)
    if len(starts) < 3:
        raise TooFewForwards(
            f"the profile holds {len(starts)} replays of a CUDA graph: without full graphs "
            "(--enforce-eager?) forward and sampler cannot be told apart."
        )
    if len(starts) > most:
        raise ValueError(
            f"the profile holds {len(starts)} replays of CUDA graphs in at most {most} steps, so "
            "that these forwards have piecewise graphs, which cannot be told apart: leave "
            "--profile out, or lower --requests."
        )
    # The first and the last step may be incomplete.
    return _means(kernels, sorted(starts.values()))


def gap_share(events: Iterable[dict[str, Any]]) -> float:
    """Return the share of a trace, from its first kernel to its last, without any kernel."""
    spans = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE:
            spans.append((event["ts"], event["ts"] + event["dur"]))
    if not spans:
        raise ValueError("the profile holds no kernels: measure without --profile.")
    first = reached = min(spans)[0]
    gaps = 0.0
    for start, stop in sorted(spans):
        gaps += max(0.0, start - reached)
        reached = max(reached, stop)
    return gaps / (reached - first)


def _group(event: dict[str, Any], is_forward: bool) -> str:
    if is_forward:
        return "forward"
    if event["cat"] != "kernel":
        return "copy"
    if EXCHANGE.search(event["name"]):
        return "exchange"
    return "lm_head" if GEMM.search(event["name"]) else "sampler"


def _means(kernels: Sequence[Kernel], edges: Sequence[float]) -> Summary:
    """Average over the steps between `edges`, except those with a forward outside of a graph."""
    steps = _steps_of(kernels, edges)
    alone = Counter(step for kernel, step in steps if kernel.graph is None)
    per_graph = Counter(step for kernel, step in steps if kernel.graph is not None)
    # A refresh launches about as many kernels as the graph of a forward holds.
    most = statistics.median(alone[i] for i in per_graph) + max(per_graph.values()) / 2
    kept = [i for i in per_graph if alone[i] <= most]
    length = sum(edges[i + 1] - edges[i] for i in kept)
    scale = 1e-3 / len(kept)
    times: dict[str, float] = defaultdict(float)
    inside: dict[str, float] = defaultdict(float)  # by name, within the graph
    outside: dict[str, float] = defaultdict(float)
    busy, reached = 0.0, edges[0]
    forward_gap, ends = 0.0, dict[Any, float]()
    launched = of_forwards = 0
    for kernel, step in steps:
        before, reached = reached, max(reached, kernel.stop)
        if alone[step] > most:
            continue
        busy += max(0.0, min(kernel.stop, edges[-1]) - max(kernel.start, before))
        milliseconds = (kernel.stop - kernel.start) * scale
        times[kernel.group] += milliseconds
        if kernel.graph is None:
            launched += 1
            outside[kernel.name[:80]] += milliseconds
            continue
        of_forwards += 1
        inside[kernel.name[:80]] += milliseconds
        end = ends.get(kernel.graph, kernel.start)
        forward_gap += max(0.0, kernel.start - end)
        ends[kernel.graph] = max(end, kernel.stop)
    return Summary(
        steps=len(kept),
        step_ms=length * scale,
        busy_ms=busy * scale,
        gap_ms=(length - busy) * scale,
        forward_gap_ms=forward_gap * scale,
        forward_ms=times["forward"],
        lm_head_ms=times["lm_head"],
        exchange_ms=times["exchange"],
        sampler_ms=times["sampler"],
        copy_ms=times["copy"],
        kernels=launched / len(kept),
        largest=_largest(outside),
        forward_kernels=of_forwards / len(kept),
        forward_largest=_largest(inside),
    )


def _steps_of(
    kernels: Sequence[Kernel], edges: Sequence[float]
) -> list[tuple[Kernel, int]]:
    """Return the kernels between the first and the last edge, each with its step's number."""
    inside = (kernel for kernel in kernels if edges[0] <= kernel.start < edges[-1])
    return [(kernel, bisect(edges, kernel.start) - 1) for kernel in inside]


def _largest(names: dict[str, float]) -> dict[str, float]:
    return dict(sorted(names.items(), key=lambda item: -item[1])[:LARGEST])
