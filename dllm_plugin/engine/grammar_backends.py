"""Compile each request's grammar by the backend that its parameters name.

vLLM gives an engine the backend of its first request, and compiles by it whatever later requests
were checked for: schemas that only guidance reads as a whole lose keywords in xgrammar.
"""

import json
import threading

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, validate_guidance_grammar
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from dllm_plugin.config.schema_keywords import loose_keyword

BACKENDS: dict[str, type[GuidanceBackend] | type[XgrammarBackend]] = {
    "xgrammar": XgrammarBackend,
    "guidance": GuidanceBackend,
}


class Backends:
    """Hold the backends that an engine needs besides vLLM's, made when a request first does."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        self.manager = manager
        self._made: dict[str, StructuredOutputBackend] = {}
        self._lock = threading.Lock()

    def is_other(self, request: Request) -> bool:
        """Tell whether a request's grammar is not what vLLM's backend makes of it."""
        return not isinstance(self.manager.backend, BACKENDS[self._name(request)])

    def compile(self, request: Request) -> StructuredOutputGrammar:
        """Compile a grammar by the request's own backend. Raises what the compiler raises."""
        ours, name = request.structured_output_request, self._name(request)
        assert ours is not None
        with self._lock:
            if name not in self._made:
                config = self.manager.vllm_config
                self._made[name] = BACKENDS[name](
                    config,
                    tokenizer=self.manager.tokenizer,
                    vocab_size=config.model_config.get_vocab_size(),
                )
            return self._made[name].compile_grammar(*ours.structured_output_key)

    def _name(self, request: Request) -> str:
        """Return the backend of a request: guidance where vLLM chose and xgrammar reads less."""
        params, ours = request.sampling_params, request.structured_output_request
        assert params is not None and params.structured_outputs is not None and ours is not None
        asked = params.structured_outputs
        name = asked._backend
        assert name is not None
        if name == "xgrammar" and asked._backend_was_auto:
            kind, spec = ours.structured_output_key
            if kind == StructuredOutputOptions.JSON and loose_keyword(json.loads(spec)):
                return "guidance"
        return name


def check_schema(params: SamplingParams) -> None:
    """Raise ValueError for a schema that no backend of its request reads as a whole."""
    asked = params.structured_outputs
    if asked is None or not asked.json or asked._backend != "xgrammar":
        return
    loose = loose_keyword(json.loads(asked.json) if isinstance(asked.json, str) else asked.json)
    if not loose:
        return
    if not asked._backend_was_auto:
        raise ValueError(
            f"structured_outputs json has {loose!r}, which xgrammar does not read as a whole: "
            "start with --structured-outputs-config.backend auto or guidance."
        )
    try:
        validate_guidance_grammar(params)
    except VLLMValidationError as error:
        raise ValueError(
            f"structured_outputs json has {loose!r}, which xgrammar does not read as a whole, and "
            f"guidance refuses the schema ({error}): write it without."
        ) from error
