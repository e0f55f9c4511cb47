"""Define what is looked at to refuse a request, by `request.exclusions`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams

from dllm_plugin.config.request.arguments import RequestArguments

if TYPE_CHECKING:
    from dllm_plugin.config.decode import DecodeConfig

DEFAULTS = SamplingParams()


@dataclass(frozen=True)
class Case:
    """Bring together a request, its engine and its parameters of vLLM.

    asked   what the request decodes with; for options: the engine's defaults
    given   what was written, by name without ``dllm_``
    params  the request's parameters of vLLM; their defaults before admission
    """

    config: "DecodeConfig"
    asked: RequestArguments
    given: Mapping[str, Any]
    params: SamplingParams = DEFAULTS

    @property
    def has_grammar(self) -> bool:
        """Return whether structured output is asked for."""
        asked = self.params.structured_outputs
        return asked is not None and not asked.all_constraints_none()

    @property
    def edits(self) -> bool:
        """Return whether the policy may replace tokens that were decided."""
        policy = self.config.method.policies[self.asked.policy]
        return "editing_threshold" in policy.reads

    def is_set(self, parameter: str) -> bool:
        """Return whether a parameter of vLLM's has another value than its default."""
        value = getattr(self.params, parameter)
        return value is not None and bool(value != getattr(DEFAULTS, parameter))
