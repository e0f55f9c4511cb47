"""Say at which forward each token of a choice was taken, and how certain it was."""

from typing import Any

from vllm.outputs import CompletionOutput

DIGITS = 6


def trace_of(completion: CompletionOutput) -> dict[str, Any]:
    """Return the trace of a choice that ended; confidence is None where no policy took the token.

    The engine sends it in the field that vLLM joins and cuts by tokens.
    """
    rows = completion.routed_experts
    steps, confidences = ([], []) if rows is None else rows.T.tolist()
    certain = [None if value != value else round(value, DIGITS) for value in confidences]
    return {"steps": list(map(int, steps)), "confidences": certain}
