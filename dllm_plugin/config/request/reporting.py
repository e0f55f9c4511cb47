"""Parse what a request wants to be told about its decoding; it never changes a token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_plugin.config.options import MAX_STEPS, REQUEST_PREFIX
from dllm_plugin.config.validation import WholeNumber

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dllm_plugin.config.decode import DecodeConfig


@dataclass(frozen=True)
class Reporting:
    """Hold what a request reports; each field is the request argument ``dllm_`` and its name.

    statistics  1: the finished output carries `spec_decode_metrics`, as in vLLM; 0: it does not
    frames      every so many forwards, what is decided of the canvas; 0: never
    early_text  1: a leading run of decided tokens is sent before its block commits
    trace       1: forward and confidence of each token, in the output's `routed_experts`
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
UNKNOWN_CONFIDENCE = 255  # of a token that no policy took; others are hundredths
SNAPSHOT = "dllm"  # key of a snapshot in vLLM's ``kv_transfer_params``


def reporting(extra_args: Mapping[str, Any] | None) -> Reporting:
    """Return what a request reports. Raises ValueError naming the value that is out of range."""
    given = extra_args or {}
    if REPORT_ARGUMENTS.isdisjoint(given):
        return DEFAULT
    named = {
        argument.removeprefix(REQUEST_PREFIX): given[argument] for argument in given
    }
    fields = {name: named[name] for name in CHECKS if name in named}
    for name, value in fields.items():
        try:
            CHECKS[name](name, value)
        except ValueError as error:
            raise ValueError(
                f"Request argument refused: {REQUEST_PREFIX}{error}"
            ) from None
    return Reporting(**fields)


def no_traces(vllm_config: "VllmConfig") -> str:
    """Return why an engine refuses every request for a trace; empty if it does not."""
    if vllm_config.aux_output_config.enable_return_routed_experts:
        return (
            "travels in the field routed_experts, which enable_return_routed_experts fills: start "
            "without it"
        )
    return ""


def check_reporting(
    extra_args: Mapping[str, Any] | None, config: "DecodeConfig", policy: str
) -> None:
    """Raise ValueError if a request, whose policy is given, cannot be told what it asks for."""
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
