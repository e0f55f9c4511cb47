"""Pack our facts into fields of vLLM's objects, and unpack them on the other side.

vLLM copies these objects between worker, scheduler and front end and has no field for
what only diffusion decoding knows. No other file names the fields. The table of
`docs/design.md` lists facts, fields and functions; a test compares it with this file.

Shape letters: C canvas positions, R requests, T rows of log-probabilities, W watched
requests, K columns of log-probabilities.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

NO_TOKEN = -1  # id of a masked position

# Snapshot of a canvas: scheduler to front end, a key of `kv_transfer_params`.

SNAPSHOT = "dllm"  # a connector's own keys lie beside ours
UNKNOWN_CONFIDENCE = 255  # other values are hundredths


class Snapshot(NamedTuple):
    """What is decided of a request's canvas after a forward.

    request_id   vLLM's internal id, which begins with the number of the choice
    forward      denoising forwards of the request so far
    start        output position of the first entry of `ids`
    final        number of leading output tokens that never change
    ids          token ids, NO_TOKEN where a position is masked
    confidences  one per id; None if no policy took the token
    """

    request_id: str
    forward: int
    start: int
    final: int
    ids: list[int]
    confidences: list[float | None]


def pack_snapshot(
    output: "EngineCoreOutput",
    forward: int,
    start: int,
    final: int,
    ids_C: np.ndarray,
    confidence_C: np.ndarray,
) -> None:
    """Add a snapshot to an output; confidence 0 means that no policy took the token."""
    hundredths_C = np.rint(confidence_C * 100).clip(0, 100).astype(np.uint8)
    hundredths_C[confidence_C == 0] = UNKNOWN_CONFIDENCE
    packed = {
        "request": output.request_id,
        "forward": forward,
        "start": start,
        "final": final,
        "ids": ids_C.astype(np.int32).tobytes(),
        "confidences": hundredths_C.tobytes(),
    }
    output.kv_transfer_params = (output.kv_transfer_params or {}) | {SNAPSHOT: packed}


def unpack_snapshot(output: "RequestOutput") -> Snapshot | None:
    """Remove the snapshot from an output, and return it; None if there is none."""
    if not output.kv_transfer_params or SNAPSHOT not in output.kv_transfer_params:
        return None
    others = dict(output.kv_transfer_params)
    packed = others.pop(SNAPSHOT)
    output.kv_transfer_params = others or None
    confidences: list[float | None] = []
    for hundredths in packed["confidences"]:
        known = hundredths != UNKNOWN_CONFIDENCE
        confidences.append(hundredths / 100 if known else None)
    return Snapshot(
        packed["request"],
        packed["forward"],
        packed["start"],
        packed["final"],
        np.frombuffer(packed["ids"], dtype=np.int32).tolist(),
        confidences,
    )


# Trace of each token: scheduler to front end, `routed_experts`.


def pack_trace(output: "EngineCoreOutput", rows_P2: np.ndarray) -> None:
    """Add rows of forward and confidence, float32, one for each token of an output."""
    output.routed_experts = rows_P2


def unpack_trace(completion: "CompletionOutput") -> np.ndarray | None:
    """Remove the joined rows from a completion that ended, and return them."""
    rows_P2, completion.routed_experts = completion.routed_experts, None
    return rows_P2


def no_traces(vllm_config: "VllmConfig") -> str:
    """Return why an engine refuses requests for a trace; empty if it takes them."""
    if vllm_config.aux_output_config.enable_return_routed_experts:
        return (
            "travels in the field routed_experts, which enable_return_routed_experts "
            "fills: start without it"
        )
    return ""


# Masks left of a block: worker to scheduler, negative counts of broken positions.


def pack_masks_left(broken_R: Tensor, left_R: Tensor) -> Tensor:
    """Return counts of broken positions, or minus the masks left if none is broken."""
    return torch.where(broken_R > 0, broken_R, -left_R)


def unpack_masks_left(results: "ModelRunnerOutput") -> dict[str, int]:
    """Remove the masks left from the counts of a step, and return them by request."""
    counts = results.num_nans_in_logits or {}
    left = {request_id: -count for request_id, count in counts.items() if count < 0}
    counts.update(dict.fromkeys(left, 0))
    return left


# Broken positions, which is what vLLM means by the same field.


def pack_broken(broken_R: Tensor) -> dict[str, Any]:
    """Return the field of vLLM's `SamplerOutput` that counts broken positions."""
    return {"num_nans": broken_R}


def unpack_broken(results: "ModelRunnerOutput") -> dict[str, int]:
    """Return how many positions of each request were broken, if any."""
    counts = results.num_nans_in_logits or {}
    return {request_id: count for request_id, count in counts.items() if count > 0}


def show_broken(outputs: Iterable["EngineCoreOutput"], broken: dict[str, int]) -> None:
    """Set in outputs the counts that vLLM's metric of corrupted requests reads."""
    for output in outputs:
        output.num_nans_in_logits = broken.get(output.request_id, 0)


# Canvas rows of watched requests: worker to scheduler, log-probabilities of which the
# ranks are negative. vLLM's own ranks are positive.

LogprobColumns = tuple[Tensor, Tensor, Tensor]  # ids [T, K], values [T, K], ranks [T]


class CanvasRow(NamedTuple):
    """The canvas of one request after a step; `taken_C`: its policy took the token now."""

    ids_C: np.ndarray
    confidence_C: np.ndarray
    taken_C: np.ndarray


def pack_canvas_rows(
    columns: LogprobColumns | None,
    ids_WC: Tensor,
    confidence_WC: Tensor,
    taken_WC: Tensor,
    index_W: Tensor,
) -> LogprobColumns:
    """Append canvases to a step's log-probabilities.

    Args:
        columns: what the step emits; None for nothing.
        index_W: place of each watched request in the batch.
    """
    ranks_T = (-1 - (2 * index_W[:, None] + taken_WC)).flatten()
    ids_T1 = ids_WC.to(torch.int32).flatten()[:, None]
    confidence_T1 = confidence_WC.flatten()[:, None]
    if columns is None:
        return ids_T1, confidence_T1, ranks_T
    ids_TK, values_TK, emitted_ranks_T = columns
    return (
        _append_first_column(ids_TK, ids_T1),
        _append_first_column(values_TK, confidence_T1),
        torch.cat([emitted_ranks_T, ranks_T]),
    )


def _append_first_column(rows_TK: Tensor, first_T1: Tensor) -> Tensor:
    padding = (0, rows_TK.shape[1] - 1)
    padded = torch.nn.functional.pad(first_T1.to(rows_TK.dtype), padding)
    return torch.cat([rows_TK, padded])


def unpack_canvas_rows(results: "ModelRunnerOutput") -> dict[int, CanvasRow]:
    """Remove the canvases from a step's log-probabilities.

    Returns them by the request's place in the batch, in the order of the places.
    """
    lists = results.logprobs
    if lists is None or not len(lists.sampled_token_ranks):
        return {}
    ranks_T = lists.sampled_token_ranks
    if ranks_T[-1] >= 0:
        return {}
    first = int(np.flatnonzero(ranks_T < 0)[0])
    place_T, taken_T = np.divmod(-1 - ranks_T[first:], 2)
    places, starts = np.unique(place_T, return_index=True)
    num_positions = len(place_T) // len(places)
    canvases = {}
    for place, start in zip(places.tolist(), starts.tolist(), strict=True):
        here = slice(first + start, first + start + num_positions)
        canvases[place] = CanvasRow(
            lists.logprob_token_ids[here, 0],
            lists.logprobs[here, 0],
            taken_T[start : start + num_positions] > 0,
        )
    results.logprobs = logprob_rows(lists, 0, first) if first else None
    return canvases


def logprob_rows(lists: "LogprobsLists", start: int, stop: int) -> "LogprobsLists":
    """Return the rows from `start` to `stop`, with the offsets of `lists`."""
    return lists._replace(
        logprob_token_ids=lists.logprob_token_ids[start:stop],
        logprobs=lists.logprobs[start:stop],
        sampled_token_ranks=lists.sampled_token_ranks[start:stop],
    )


# Requests that ended and widths of steps: scheduler to the stat loggers of front ends,
# six integers each in `num_draft_tokens_per_pos`.

REPORT = 6
WIDTHS = -1  # first integer of a report of widths; other reports begin with a reason
MILLI = 1000


class EndedRequest(NamedTuple):
    """What a request took; `reason`: vLLM's `FinishReason` as an integer."""

    reason: int
    forwards: int
    tokens: int
    positions: int


class StepWidth(NamedTuple):
    """The width of a step, and what it was chosen by.

    width    canvas positions of each request
    changes  how often the width has changed since the last report
    p0, lam  fitted acceptance of the first mask, and how fast it falls with the rank
    scale    observed by predicted time of steps; 0 if no times were measured
    """

    width: int
    changes: int
    p0: float
    lam: float
    scale: float = 0.0


def pack_reports(
    stats: "SpecDecodingStats", ended: list[EndedRequest], width: StepWidth | None
) -> None:
    """Add reports to the statistics of a step."""
    numbers = []
    for request in ended:
        numbers += [*request, 0, 0]
    if width is not None:
        fitted = (round(MILLI * part) for part in (width.p0, width.lam, width.scale))
        numbers += [WIDTHS, width.width, width.changes, *fitted]
    stats.num_draft_tokens_per_pos = numbers


def unpack_reports(
    stats: "SpecDecodingStats",
) -> tuple[list[EndedRequest], list[StepWidth]]:
    """Return the reports in the statistics of a step."""
    numbers = stats.num_draft_tokens_per_pos
    ended, widths = [], []
    for i in range(0, len(numbers), REPORT):
        kind, first, second, third, fourth, fifth = numbers[i : i + REPORT]
        if kind == WIDTHS:
            fitted = (third / MILLI, fourth / MILLI, fifth / MILLI)
            widths.append(StepWidth(first, second, *fitted))
        else:
            ended.append(EndedRequest(kind, first, second, third))
    return ended, widths


# Cached prompt tokens and grammar mode: scheduler to clients, `per_step_drafted`
# while `per_step_accepted` is empty, as it is unless canvases float. Users may read it.


def pack_start(
    counts: "RequestSpecDecodeMetrics", cached_tokens: int, grammar: int | None
) -> None:
    """Record how a request started, once: one that was preempted starts again.

    Args:
        grammar: place in `arguments.GRAMMAR_MODES`; None without a grammar.
    """
    if not counts.per_step_drafted:
        mode = [] if grammar is None else [grammar]
        counts.per_step_drafted = [cached_tokens, *mode]


def unpack_start(counts: "RequestSpecDecodeMetrics") -> tuple[int, int | None]:
    """Return cached prompt tokens and the place of the grammar mode, None without a grammar."""
    cached, *mode = counts.per_step_drafted or [0]
    return cached, mode[0] if mode else None


# Width of each forward of a floating canvas, which is what vLLM means by the same fields.


def pack_width(counts: "RequestSpecDecodeMetrics", width: int, committed: int) -> None:
    """Record a forward: how many positions it computed and how many it committed."""
    counts.per_step_drafted.append(width)
    counts.per_step_accepted.append(committed)


def unpack_committed(counts: "RequestSpecDecodeMetrics") -> list[int]:
    """Return the number of tokens that each forward committed."""
    return counts.per_step_accepted


def unpack_widths(counts: "RequestSpecDecodeMetrics") -> list[int] | None:
    """Return the width of each forward; None if canvases do not float."""
    return counts.per_step_drafted if counts.per_step_accepted else None


# Why a request left the batch or comes back: scheduler to worker, its id.

PREEMPTED, FINISHED, RESUMED = "preempted", "finished", "resumed"


class MarkedId(str):
    """A request's id with a fact; equal to the plain id, and pickled with the fact.

    why      PREEMPTED, FINISHED or RESUMED
    numbers  FINISHED: pages that only a request with broken logits had
             RESUMED: where each piece that a floating canvas committed ends, absolute
    """

    why: str
    numbers: tuple[int, ...]


def pack_id(req_id: str, why: str, numbers: tuple[int, ...] = ()) -> MarkedId:
    """Mark the id of a request that leaves or comes back."""
    marked = MarkedId(req_id)
    marked.why, marked.numbers = why, numbers
    return marked


def unpack_id(req_id: str) -> tuple[str, tuple[int, ...]]:
    """Return why a request leaves or comes back, and its numbers; "" for a plain id."""
    return (req_id.why, req_id.numbers) if isinstance(req_id, MarkedId) else ("", ())


def pack_departures(
    output: "SchedulerOutput", pages: dict[str, tuple[int, ...]]
) -> None:
    """Mark the ids that a step removes.

    Args:
        pages: of requests with broken logits, the pages that workers have to clear;
            entries that are sent are removed.
    """
    finished, preempted = output.finished_req_ids, output.preempted_req_ids
    if preempted:
        # Between two steps a request can be preempted and then aborted.
        only = preempted - finished
        output.preempted_req_ids = {pack_id(i, PREEMPTED) for i in only}
    if finished:
        output.finished_req_ids = {
            pack_id(i, FINISHED, pages.pop(i, ())) for i in finished
        }
