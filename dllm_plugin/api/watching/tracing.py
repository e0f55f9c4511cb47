"""Report a request's counts as an OpenTelemetry span."""

from collections.abc import Mapping

from vllm.tracing import (
    SpanAttributes,
    SpanKind,
    extract_trace_context,
    instrument_manual,
)

from dllm_plugin.api.counts import Counts, total

SPAN = "diffusion_decode"
PREFIX = "diffuplug."


def trace(
    request_id: str,
    headers: Mapping[str, str] | None,
    started: int,
    of_choices: list[Counts],
) -> None:
    """Send one span from `started` (nanoseconds) to now, a child of the request's own trace."""
    if not of_choices:
        return
    numbers = {
        PREFIX + name: value for name, value in total(of_choices).as_json().items()
    }
    instrument_manual(
        span_name=SPAN,
        start_time=started,
        attributes={SpanAttributes.GEN_AI_REQUEST_ID: request_id, **numbers},
        context=extract_trace_context(headers),
        kind=SpanKind.INTERNAL,
    )
