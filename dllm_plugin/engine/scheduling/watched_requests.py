"""Turn what steps decided of watched requests into snapshots and early text.

The scheduler's part of :mod:`dllm_plugin.sampling.features.watched_rows`. A snapshot is everything
that is decided of a canvas, so a lost snapshot costs nothing: the next has it all.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

from dllm_plugin.config.request.reporting import SNAPSHOT, UNKNOWN_CONFIDENCE, Reporting
from dllm_plugin.engine.scheduling.traces import NO_TOKEN, Trace


@dataclass
class Watch:
    """Hold what a watched request asks for and was told.

    trace  what it is told at its end, if it asks for that
    sent   output tokens that were handed out; told: the forward of its last snapshot
    """

    asked: Reporting
    counts: RequestSpecDecodeMetrics
    trace: Trace | None = None
    sent: int = 0
    told: int = 0


class WatchedStep(NamedTuple):
    """Hold what a step decided of one request.

    base     output tokens that it had committed before; row i is output position base + i
    taken_C  bool, its policy took the token in this step
    """

    watch: Watch
    request: Request
    place: int
    base: int
    ids_C: np.ndarray
    confidence_C: np.ndarray
    taken_C: np.ndarray

    @property
    def forwards(self) -> int:
        """Return the request's denoising forwards so far."""
        return sum(self.watch.counts.histogram)

    def decided(self, committed: int, max_model_len: int) -> tuple[int, int]:
        """Return how many positions the request's text may have here, and their leading run."""
        request = self.request
        end = min(request.max_tokens, max_model_len - request.num_prompt_tokens)
        window = min(len(self.ids_C), end - self.base)
        if request.is_finished():
            window = min(window, committed - self.base)
        holes = np.flatnonzero(self.ids_C[:window] == NO_TOKEN)
        return window, int(holes[0]) if len(holes) else window


def take_rows(
    output: ModelRunnerOutput,
) -> list[tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Take the rows of watched requests off a step's log-probabilities.

    Returns the place in the batch of each, its token ids, their confidences and which are new.
    Their ranks, which are positive for log-probabilities, say the place and that.
    """
    lists = output.logprobs
    if (
        lists is None
        or not len(lists.sampled_token_ranks)
        or lists.sampled_token_ranks[-1] >= 0
    ):
        return []
    ranks = lists.sampled_token_ranks
    first = int(np.flatnonzero(ranks < 0)[0])
    place_T, taken_T = np.divmod(-1 - ranks[first:], 2)
    places, starts = np.unique(place_T, return_index=True)
    columns = (
        lists.logprob_token_ids[first:, 0],
        lists.logprobs[first:, 0],
        taken_T > 0,
    )
    num_positions = len(place_T) // len(places)
    found = []
    for place, start in zip(places.tolist(), starts.tolist(), strict=True):
        ids_C, confidence_C, taken_C = (
            rows[start : start + num_positions] for rows in columns
        )
        found.append((place, (ids_C, confidence_C, taken_C)))
    output.logprobs = (
        _rows_of(lists, 0, first, lists.cu_num_generated_tokens) if first else None
    )
    return found


def _rows_of(
    lists: LogprobsLists, start: int, stop: int, offsets: list[int] | None
) -> LogprobsLists:
    rows = slice(start, stop)
    ids, logprobs, ranks = (
        lists.logprob_token_ids,
        lists.logprobs,
        lists.sampled_token_ranks,
    )
    return LogprobsLists(ids[rows], logprobs[rows], ranks[rows], offsets)


def new_tokens(step: WatchedStep, committed: int, run: int) -> list[int]:
    """Return the tokens to hand out now under early text, and note that they were."""
    watch, request = step.watch, step.request
    have = (
        committed
        if request.is_finished()
        else max(watch.sent, step.base + run, committed)
    )
    early = step.ids_C[
        max(watch.sent, committed) - step.base : max(have - step.base, 0)
    ]
    tokens = [*request.output_token_ids[watch.sent : committed], *early.tolist()]
    watch.sent = max(have, watch.sent)
    return tokens


def early_logprobs(
    lists: LogprobsLists | None, step: WatchedStep, first: int, num_tokens: int
) -> LogprobsLists | None:
    """Return the log-probabilities of the tokens from output position `first` on."""
    params = step.request.sampling_params
    if lists is None or params is None or params.num_logprobs is None:
        return None
    assert lists.cu_num_generated_tokens is not None
    start = lists.cu_num_generated_tokens[step.place] + first - step.base
    return _rows_of(lists, start, start + num_tokens, None)


def snapshot(step: WatchedStep, committed: int, window: int) -> dict[str, Any] | None:
    """Return what is decided, if the request wants to know it after this forward."""
    watch, forwards = step.watch, step.forwards
    every = watch.asked.frames
    if not every or (forwards - watch.told < every and not step.request.is_finished()):
        return None
    params = step.request.sampling_params
    if params is None or (
        params.num_logprobs is not None and not (committed or watch.sent)
    ):
        return None  # before its first token vLLM hands its own list of log-probabilities out
    watch.told = forwards
    hundredths = np.rint(step.confidence_C[:window] * 100).clip(0, 100).astype(np.uint8)
    hundredths[step.confidence_C[:window] == 0] = UNKNOWN_CONFIDENCE
    return {
        SNAPSHOT: {
            "request": step.request.request_id,
            "forward": forwards,
            "start": step.base,
            "final": max(committed, watch.sent),
            "ids": step.ids_C[:window].astype(np.int32).tobytes(),
            "confidences": hundredths.tobytes(),
        }
    }


def report(
    step: WatchedStep,
    output: EngineCoreOutput | None,
    lists: LogprobsLists | None,
    max_model_len: int,
) -> EngineCoreOutput | None:
    """Return the output of a step of one request: vLLM's own, a changed one, a new one, or none."""
    request, watch = step.request, step.watch
    committed = request.num_output_tokens
    window, run = step.decided(committed, max_model_len)
    tokens, logprobs, first = None, None, step.base
    if watch.trace is not None:
        watch.trace.note(
            step.base, step.forwards, step.ids_C, step.confidence_C, step.taken_C
        )
    if watch.asked.early_text:
        first = watch.sent
        tokens = new_tokens(step, committed, run)
        logprobs = early_logprobs(lists, step, first, len(tokens))
    told = snapshot(step, committed, window)
    if output is None:
        if not tokens and told is None:
            return None
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
    if tokens is not None:
        output.new_token_ids, output.new_logprobs = tokens, logprobs
    if told is not None:
        output.kv_transfer_params = told
    if watch.trace is not None and output.new_token_ids:
        output.routed_experts = watch.trace.rows(first, len(output.new_token_ids))
    says = output.new_token_ids or output.finished or told or output.prefill_stats
    return output if says else None
