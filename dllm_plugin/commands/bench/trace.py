"""Where a step's time goes: kernels of a Chrome trace, by what launched them.

The model's forward is replayed as one CUDA graph per step, so its kernels are those whose
correlation id is that of a ``cudaGraphLaunch``. Of the others, matrix products are the LM head,
NCCL's and vLLM's collectives the exchange of logits between ranks, and the rest is sampler, policy,
plan and the runner's own preparation. Times of a trace are microseconds.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|wgmma", re.IGNORECASE)
EXCHANGE = re.compile(r"nccl|cross_device", re.IGNORECASE)
LARGEST = 12


class Kernel(NamedTuple):
    """One interval on the device."""

    start: float
    stop: float
    name: str
    part: str  # forward, lm_head, exchange, sampler, copy
    graph: Any  # which replay it is of; None of those launched one by one


@dataclass(frozen=True)
class Summary:
    """Means per step over `steps` whole steps; milliseconds unless said otherwise.

    step_ms is from the forward's first kernel to that of the next step; busy_ms of it the device
    did something, gap_ms nothing, and forward_gap_ms of it lay between kernels of the graph, unless
    something else ran there. The parts add up to busy_ms unless they overlapped.
    """

    steps: int
    step_ms: float
    busy_ms: float
    gap_ms: float
    forward_gap_ms: float
    forward_ms: float
    lm_head_ms: float
    exchange_ms: float  # between ranks, outside of the graph
    sampler_ms: float  # sampler, policy, plan, and the runner's preparation
    copy_ms: float
    kernels: float  # launched outside of the graph
    largest: dict[str, float]  # name -> ms, outside of the graph
    forward_kernels: float
    forward_largest: dict[str, float]


def summarise(events: Iterable[dict[str, Any]]) -> Summary:
    """Summary of the steps in the ``traceEvents`` of one device.

    ValueError if the trace holds fewer than two replays of a forward, as when nothing was captured.
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
    # Smaller graphs, if any, are not the model.
    forwards = {n for n, size in sizes.items() if 2 * size > max(sizes.values())}
    starts: dict[Any, float] = {}
    kernels = []
    for start, stop, event, number in sorted(found, key=lambda item: item[0]):
        graph = number if number in forwards else None
        kernels.append(Kernel(start, stop, event["name"], _part(event, graph is not None), graph))
        if graph is not None:
            starts.setdefault(graph, start)
    if len(starts) < 3:
        raise ValueError(
            f"the profile holds {len(starts)} replays of a CUDA graph: without full graphs "
            "(--enforce-eager?) forward and sampler cannot be told apart."
        )
    # The first and the last step may be cut.
    edges = sorted(starts.values())
    return _means(kernels, edges[0], edges[-1], len(edges) - 1)


def _part(event: dict[str, Any], is_forward: bool) -> str:
    if is_forward:
        return "forward"
    if event["cat"] != "kernel":
        return "copy"
    if EXCHANGE.search(event["name"]):
        return "exchange"
    return "lm_head" if PRODUCT.search(event["name"]) else "sampler"


def _means(kernels: Sequence[Kernel], first: float, last: float, steps: int) -> Summary:
    inside = [k for k in kernels if first <= k.start < last]
    scale = 1e-3 / steps
    parts: dict[str, float] = defaultdict(float)
    names: dict[bool, dict[str, float]] = {True: defaultdict(float), False: defaultdict(float)}
    busy, reached = 0.0, first
    forward_gap, ends = 0.0, dict[Any, float]()
    for kernel in inside:
        parts[kernel.part] += kernel.stop - kernel.start
        names[kernel.graph is not None][kernel.name[:80]] += (kernel.stop - kernel.start) * scale
        busy += max(0.0, min(kernel.stop, last) - max(kernel.start, reached))
        reached = max(reached, kernel.stop)
        if kernel.graph is not None:
            end = ends.get(kernel.graph, kernel.start)
            forward_gap += max(0.0, kernel.start - end)
            ends[kernel.graph] = max(end, kernel.stop)
    of_forwards = sum(k.graph is not None for k in inside)
    return Summary(
        steps=steps,
        step_ms=(last - first) * scale,
        busy_ms=busy * scale,
        gap_ms=(last - first - busy) * scale,
        forward_gap_ms=forward_gap * scale,
        forward_ms=parts["forward"] * scale,
        lm_head_ms=parts["lm_head"] * scale,
        exchange_ms=parts["exchange"] * scale,
        sampler_ms=parts["sampler"] * scale,
        copy_ms=parts["copy"] * scale,
        kernels=(len(inside) - of_forwards) / steps,
        largest=_largest(names[False]),
        forward_kernels=of_forwards / steps,
        forward_largest=_largest(names[True]),
    )


def _largest(names: dict[str, float]) -> dict[str, float]:
    return dict(sorted(names.items(), key=lambda item: -item[1])[:LARGEST])
