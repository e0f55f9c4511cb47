"""Pack facts for front ends into fields of vLLM's objects, and unpack them there.

vLLM copies these objects between worker, scheduler and front end and has no field for
what only diffusion decoding knows. No file but this one and
:mod:`dllm_plugin.config.worker_carriers` names the fields. The table of `docs/design.md`
lists facts, fields and functions; a test compares it with both files.

Shape letters: C canvas positions, P output positions.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .validation import shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

NO_TOKEN = -1  # id of a masked position

# Snapshot of a canvas: scheduler to front end, a key of `kv_transfer_params`.

SNAPSHOT = "dllm"  # a connector's keys lie in the same field
UNKNOWN_CONFIDENCE = 255  # other values are hundredths


class Snapshot(NamedTuple):
    """Store what is decided of a request's canvas after a forward.

    request_id   vLLM's internal id, which begins with the number of the choice
    forward      denoising forwards of the request so far
    start        output position of the first entry of `ids`
    final        number of leading output tokens that never change
    ids          token ids, NO_TOKEN if a position is masked
    confidences  one per id; None if no policy took the token
    drafts       how many were judged and accepted so far; None if no forward judges any
    """

    request_id: str
    forward: int
    start: int
    final: int
    ids: list[int]
    confidences: list[float | None]
    drafts: tuple[int, int] | None = None


def pack_snapshot(
    output: "EngineCoreOutput",
    forward: int,
    start: int,
    final: int,
    ids_C: np.ndarray,
    confidence_C: np.ndarray,
    drafts: tuple[int, int] | None = None,
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
        "drafts": drafts,
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
        None if packed["drafts"] is None else tuple(packed["drafts"]),
    )


# Trace of each token: scheduler to front end, `routed_experts`.


def pack_trace(output: "EngineCoreOutput", rows_P2: np.ndarray) -> None:
    """Add rows of forward and confidence, float32, one for each token of an output."""
    output.routed_experts = rows_P2


def unpack_trace(completion: "CompletionOutput") -> np.ndarray | None:
    """Remove the joined rows from a completion that ended, and return them."""
    rows_P2 = completion.routed_experts
    completion.routed_experts = None
    return rows_P2


def no_traces(vllm_config: "VllmConfig") -> str:
    """Return why an engine refuses requests for a trace; empty if it takes them."""
    if vllm_config.aux_output_config.enable_return_routed_experts:
        return (
            "travels in the field routed_experts, which enable_return_routed_experts "
            "fills: start without it"
        )
    return ""


# Requests that ended and widths of steps: scheduler to the stat loggers of front ends,
# six integers each in `num_draft_tokens_per_pos`.

REPORT = 6
WIDTHS = -1  # first integer of a report of widths; other reports begin with a reason
MILLI = 1000


class EndedRequest(NamedTuple):
    """Store the counts of an ended request; `reason`: vLLM's `FinishReason` as an integer."""

    reason: int
    forwards: int
    tokens: int
    positions: int


class StepWidth(NamedTuple):
    """Store the width of a step, and the numbers it was chosen by.

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
        grammar: place in `arguments.GRAMMAR_MODES`, never 0; None without a grammar.
    """
    if not counts.per_step_drafted:
        mode = [] if grammar is None else [grammar]
        counts.per_step_drafted = [cached_tokens, *mode]


def unpack_start(counts: "RequestSpecDecodeMetrics") -> tuple[int, int | None]:
    """Return cached prompt tokens and the place of the grammar mode, None without a grammar."""
    cached, *mode = counts.per_step_drafted or [0]
    return cached, mode[0] if mode and mode[0] else None


# Drafts of a request: judged by causal forwards, and accepted. Two entries after those.


def pack_drafts(counts: "RequestSpecDecodeMetrics", judged: int, accepted: int) -> None:
    """Count drafts that a forward has judged, and those that it has accepted."""
    facts = counts.per_step_drafted
    facts += [0] * (4 - len(facts))
    facts[2] += judged
    facts[3] += accepted


def unpack_drafts(counts: "RequestSpecDecodeMetrics") -> tuple[int, int] | None:
    """Return how many drafts were judged and accepted; None if no forward judges any."""
    if counts.per_step_accepted or len(counts.per_step_drafted) != 4:
        return None
    _, _, judged, accepted = counts.per_step_drafted
    return judged, accepted


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


# Computed positions of a request, in the field that vLLM counts draft tokens in. Users may
# read it.


def pack_positions(counts: "RequestSpecDecodeMetrics", computed: int) -> None:
    """Count positions that a step computes for a request, prompt and refreshes included."""
    counts.num_draft_tokens += computed


def unpack_positions(counts: "RequestSpecDecodeMetrics") -> int:
    """Return how many positions were computed for a request."""
    return counts.num_draft_tokens


# Pages of another server: front end to scheduler, in this argument of a request.

TRANSFER = "kv_transfer_params"
# What the answer of a server that prefills says of its pages.
PULLED: dict[str, type] = {
    "remote_block_ids": list,
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
}
PULLED_SIZES = ("tp_size", "dcp_size", "pp_size")


def wrong_pages(given: Any) -> str | None:
    """Return what `kv_transfer_params` lack for a server that pulls pages; None if nothing."""
    if not isinstance(given, dict):
        return f"they are {shown(given)}"
    pages = given.get("remote_block_ids")
    if not given.get("do_remote_prefill"):
        return "do_remote_prefill is not set" if pages else None
    if "remote_block_size" in given:
        return "they hold remote_block_size"
    for name, kind in PULLED.items():
        if not isinstance(given.get(name), kind):
            return f"{name} is {shown(given.get(name))}"
    for name in PULLED_SIZES:
        if not isinstance(given.get(name, 1), int):
            return f"{name} is {shown(given[name])}"
    for group in given["remote_block_ids"]:
        numbers = group if isinstance(group, list) else [None]
        for number in numbers:
            if type(number) is not int or not 0 <= number < 2**31:
                return f"remote_block_ids is {shown(pages)}"
    return None


def drop_wrong_pages(request: "Request") -> None:
    """Forget pages that vLLM could not look up; it sends those of a refused request, too."""
    given = request.kv_transfer_params
    if given is not None and wrong_pages(given) is not None:
        request.kv_transfer_params = None
