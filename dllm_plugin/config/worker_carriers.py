"""Pack facts into fields that workers and the scheduler exchange, and unpack them.

See :mod:`dllm_plugin.config.carriers`. Shape letters: C canvas positions, R requests,
T rows of log-probabilities, W watched requests, K columns of log-probabilities.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

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
    """Store a request's canvas after a step; `taken_C`: its policy took the token in this step."""

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


# Canvases of requests with a grammar: worker to scheduler, after the emitted ids, which are
# all that vLLM reads of `sampled_token_ids`.


def pack_canvases(tokens_RC: Tensor) -> dict[str, Any]:
    """Return the field of vLLM's `SamplerOutput` with emitted ids and the rest of each canvas."""
    return {"sampled_token_ids": tokens_RC}


def unpack_canvases(
    sampled_token_ids: np.ndarray, results: "ModelRunnerOutput", req_ids: Sequence[str]
) -> dict[str, list[int]]:
    """Return whole canvases of requests, before vLLM cuts them to what was emitted."""
    index = results.req_id_to_index
    return {i: sampled_token_ids[index[i]].tolist() for i in req_ids}


# Why a request left the batch or comes back: scheduler to worker, its id.

PREEMPTED, FINISHED, RESUMED = "preempted", "finished", "resumed"


class MarkedId(str):
    """Combine a request's id with a fact; equal to the plain id, and pickled with the fact.

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
    finished = output.finished_req_ids
    preempted = output.preempted_req_ids
    if preempted:
        # Between two steps a request can be preempted and then aborted.
        only = preempted - finished
        output.preempted_req_ids = {pack_id(i, PREEMPTED) for i in only}
    if finished:
        output.finished_req_ids = {
            pack_id(i, FINISHED, pages.pop(i, ())) for i in finished
        }


# Whether a request is the hidden unconditional one of a guided request: its id.

UNCONDITIONAL_SUFFIX = "\0unguided"  # no client can send such an id


def pack_unconditional(request_id: str) -> str:
    """Return the id of a guided request's hidden unconditional request."""
    return request_id + UNCONDITIONAL_SUFFIX


def unpack_unconditional(request_id: str) -> str:
    """Return the id of the conditional request that an unconditional one belongs to."""
    return request_id.removesuffix(UNCONDITIONAL_SUFFIX)


def is_unconditional(request_id: str) -> bool:
    """Return whether this is the id of a hidden unconditional request."""
    return request_id.endswith(UNCONDITIONAL_SUFFIX)
