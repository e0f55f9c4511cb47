"""Send snapshots, early text and traces of watched requests.

The scheduler's part of :mod:`dllm_plugin.sampling.features.watched_rows`. A snapshot has
all that is decided of a canvas, so a lost snapshot costs nothing: the next has it all.

Shape letters: C canvas positions, P output positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

from dllm_plugin.config.carriers import (
    NO_TOKEN,
    pack_snapshot,
    pack_trace,
    unpack_drafts,
)
from dllm_plugin.config.request.arguments import RequestArguments
from dllm_plugin.config.worker_carriers import (
    CanvasRow,
    logprob_rows,
    unpack_canvas_rows,
)


class Trace:
    """Store the trace of one request.

    rows_P2  float32: forward, 0 for tokens that were there before the first forward;
             confidence, NaN if no policy took the token
    known_P  bool, the position has a token
    """

    def __init__(self, num_positions: int) -> None:
        self.rows_P2 = np.zeros((num_positions, 2), dtype=np.float32)
        self.known_P = np.zeros(num_positions, dtype=np.bool_)
        self._sent = 0

    def give(self, num_tokens: int) -> None:
        """Record leading tokens that a template gives."""
        self.rows_P2[:num_tokens, 1] = np.nan

    def record(self, base: int, forward: int, canvas: CanvasRow) -> None:
        """Record a forward's canvas, which starts at output position `base`."""
        known_C = self.known_P[base : base + len(canvas.ids_C)]
        length = len(known_C)
        rows_C2 = self.rows_P2[base : base + length]
        decided_C = canvas.ids_C[:length] != NO_TOKEN
        taken_C = canvas.taken_C[:length] & decided_C
        # A new token that no policy took was known before this forward.
        found_C = decided_C & ~known_C & ~taken_C
        rows_C2[taken_C, 0] = forward
        rows_C2[found_C, 0] = forward - 1
        new_C = taken_C | found_C
        certain_C = canvas.confidence_C[:length]
        rows_C2[new_C, 1] = np.where(certain_C > 0, certain_C, np.nan)[new_C]
        known_C[:] = decided_C

    def take(self, stop: int) -> np.ndarray:
        """Return the rows up to output position `stop` that were not sent before."""
        rows_P2 = self.rows_P2[self._sent : stop].copy()
        self._sent = stop
        return rows_P2


@dataclass
class Watch:
    """Store the arguments of a watched request, and what was sent of it.

    most      output tokens at most
    tokens    output tokens that were sent as early text, or that a template gives
    reported  forward of the last snapshot
    """

    asked: RequestArguments
    counts: RequestSpecDecodeMetrics
    most: int
    trace: Trace | None
    tokens: list[int] = field(default_factory=list)
    reported: int = 0

    @property
    def forwards(self) -> int:
        """Return the request's denoising forwards so far."""
        return sum(self.counts.histogram)

    def give(self, token_ids: list[int]) -> None:
        """Count leading tokens that a template gives as sent."""
        self.tokens = list(token_ids)
        if self.trace is not None:
            self.trace.give(len(token_ids))


class WatchedStep(NamedTuple):
    """Store a step of one watched request.

    place  in the batch
    base   output tokens committed before; canvas row i is output position base + i
    """

    watch: Watch
    request: Request
    place: int
    base: int
    canvas: CanvasRow


def begin_step(
    requests: Mapping[str, Request],
    watches: Mapping[str, Watch],
    results: ModelRunnerOutput,
) -> list[WatchedStep]:
    """Return what a step decided of watched requests, before they are updated."""
    canvases = unpack_canvas_rows(results)
    if not canvases:
        return []
    steps = []
    for req_id, place in results.req_id_to_index.items():
        request = requests.get(req_id)
        watch = watches.get(req_id)
        if place not in canvases or request is None or watch is None:
            continue
        # vLLM drops results of requests that were preempted or aborted meanwhile.
        stale = request.num_stale_output_tokens > 0
        if request.is_finished() or (stale and request.drop_stale_output):
            continue
        base = request.num_output_tokens
        canvas = canvases[place]
        steps.append(WatchedStep(watch, request, place, base, canvas))
    return steps


def end_step(
    steps: list[WatchedStep],
    outputs: dict[int, EngineCoreOutputs],
    lists: LogprobsLists | None,
    manager: KVCacheManager,
) -> None:
    """Add snapshots, early text and traces to the outputs of a step."""
    if not steps:
        return
    known: dict[str, EngineCoreOutput] = {}
    for of_client in outputs.values():
        known |= {output.request_id: output for output in of_client.outputs}
    silent: set[str] = set()  # their text was sent before, as early text
    for step in steps:
        request = step.request
        found = known.get(request.request_id)
        if found is not None:
            says = add_report(step, found, lists)
            if not (says or found.finished or found.prefill_stats is not None):
                silent.add(found.request_id)
            continue
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            trace_headers=request.trace_headers,
        )
        if not add_report(step, output, lists):
            continue
        output.events = request.take_events()
        # As vLLM reports it with the first output of a request.
        output.prefill_stats = request.take_prefill_stats()
        if output.prefill_stats is not None:
            cached = manager.estimate_cached_tokens(request)
            output.prefill_stats.finalize(cached)
        of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
        of_client.outputs.append(output)
    if silent:
        for of_client in outputs.values():
            left = [each for each in of_client.outputs if each.request_id not in silent]
            of_client.outputs[:] = left


def add_report(
    step: WatchedStep, output: EngineCoreOutput, lists: LogprobsLists | None
) -> bool:
    """Add a step's report to an output; returns whether it has tokens or a snapshot."""
    watch, request = step.watch, step.request
    committed = request.num_output_tokens
    base, canvas = step.base, step.canvas
    window = min(len(canvas.ids_C), watch.most - base)
    if request.is_finished():
        window = min(window, committed - base)
    if watch.trace is not None:
        watch.trace.record(base, watch.forwards, canvas)
    first = base
    if watch.asked.early_text:
        first = len(watch.tokens)
        tokens = new_tokens(step, committed, window)
        output.new_token_ids = tokens
        output.new_logprobs = early_logprobs(lists, step, first, tokens)
    wanted = wants_snapshot(step, committed)
    if wanted:
        watch.reported = watch.forwards
        final = max(committed, len(watch.tokens))
        shown = canvas.ids_C[:window], canvas.confidence_C[:window]
        drafts = unpack_drafts(watch.counts)
        pack_snapshot(output, watch.forwards, base, final, *shown, drafts)
    if watch.trace is not None and output.new_token_ids:
        stop = first + len(output.new_token_ids)
        pack_trace(output, watch.trace.take(stop))
    return wanted or bool(output.new_token_ids)


def new_tokens(step: WatchedStep, committed: int, window: int) -> list[int]:
    """Return the tokens to send now: the committed tokens, and the run that follows."""
    watch, request = step.watch, step.request
    stop = committed
    if not request.is_finished():
        holes = np.flatnonzero(step.canvas.ids_C[:window] == NO_TOKEN)
        run = int(holes[0]) if len(holes) else window
        stop = max(committed, step.base + run)
    sent = len(watch.tokens)
    tokens = list(request.output_token_ids[sent:committed])
    start = max(sent, committed) - step.base
    stop = max(stop - step.base, 0)
    tokens += step.canvas.ids_C[start:stop].tolist()
    watch.tokens += tokens
    return tokens


def early_logprobs(
    lists: LogprobsLists | None, step: WatchedStep, first: int, tokens: list[int]
) -> LogprobsLists | None:
    """Return the log-probabilities of tokens that begin at output position `first`."""
    params = step.request.sampling_params
    if lists is None or params is None or params.num_logprobs is None:
        return None
    assert lists.cu_num_generated_tokens is not None
    start = lists.cu_num_generated_tokens[step.place] + first - step.base
    rows = logprob_rows(lists, start, start + len(tokens))
    return rows._replace(cu_num_generated_tokens=None)


def wants_snapshot(step: WatchedStep, committed: int) -> bool:
    """Return whether a request asks for a snapshot after this forward."""
    watch, request = step.watch, step.request
    every = watch.asked.frames
    params = request.sampling_params
    if not every or params is None:
        return False
    if params.num_logprobs is not None and not (committed or watch.tokens):
        # Before its first token vLLM sends its own list of log-probabilities.
        return False
    return request.is_finished() or watch.forwards - watch.reported >= every
