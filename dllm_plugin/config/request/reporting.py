"""Parse what a request reports of its decoding, which never changes a token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_plugin.config.options import MAX_STEPS, REQUEST_PREFIX
from dllm_plugin.config.validation import WholeNumber

if TYPE_CHECKING:
    from dllm_plugin.config.decode import DecodeConfig


@dataclass(frozen=True)
class Reporting:
    """What a request reports; each field is the request argument ``dllm_`` and its name.

    statistics  1: the finished output has `spec_decode_metrics`, as in vLLM; 0: it has not
    frames      every so many forwards, a snapshot of the canvas; 0: never
    early_text  1: a leading run of decided tokens is sent before its block commits
    trace       1: forward and confidence of each token
    """

    statistics: int = 1
    frames: int = 0
    early_text: int = 0
    trace: int = 0

    @property
    def watches(self) -> bool:
        """Return whether steps of the request bring its canvas to the host."""
        return bool(self.frames or self.early_text or self.trace)


CHECKS = {
    "statistics": WholeNumber(0, 1),
    "frames": WholeNumber(0, MAX_STEPS),
    "early_text": WholeNumber(0, 1),
    "trace": WholeNumber(0, 1),
}
REPORT_ARGUMENTS = frozenset(REQUEST_PREFIX + name for name in CHECKS)
STATISTICS, FRAMES, EARLY_TEXT, TRACE = (REQUEST_PREFIX + name for name in CHECKS)


def reporting(extra_args: Mapping[str, Any] | None) -> Reporting:
    """Return what a request reports; raises ValueError for a value out of range."""
    given = extra_args or {}
    if REPORT_ARGUMENTS.isdisjoint(given):
        return DEFAULT
    fields = {}
    for name, check in CHECKS.items():
        argument = REQUEST_PREFIX + name
        if argument not in given:
            continue
        fields[name] = given[argument]
        try:
            check(argument, fields[name])
        except ValueError as error:
            raise ValueError(f"Request argument refused: {error}") from None
    return Reporting(**fields)


def check_reporting(
    extra_args: Mapping[str, Any] | None, config: "DecodeConfig", policy: str
) -> None:
    """Raise ValueError if a request with this policy cannot report what it asks for."""
    asked = reporting(extra_args)
    if asked.trace and config.no_traces:
        raise ValueError(f"{TRACE} {config.no_traces}.")
    # Some policies may replace tokens that were decided.
    if asked.early_text and "editing_threshold" in config.method.policies[policy].reads:
        raise ValueError(
            f"{EARLY_TEXT} cannot be combined with policy {policy}, which may still replace "
            "tokens of an open block."
        )


DEFAULT = Reporting()
