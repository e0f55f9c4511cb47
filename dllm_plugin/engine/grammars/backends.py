"""Compile each request's grammar by the backend that suits it.

vLLM gives an engine the backend of its first request: 0.32 compiles by it whatever later requests
were checked for, and 0.33 refuses those that were checked for another one. So ours takes its place.
"""

import json
import threading
from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    GuidanceGrammar,
    validate_guidance_grammar,
)
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputKey,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from dllm_plugin.engine.grammars.automata import OwnGrammar
from dllm_plugin.engine.grammars.charts import MANY
from dllm_plugin.grammar.patterns import written_out
from dllm_plugin.grammar.regular import expression
from dllm_plugin.grammar.schema_keywords import (
    has_rough_format,
    loose_keyword,
    most_values,
)

XGRAMMAR, GUIDANCE = "xgrammar", "guidance"
BACKENDS: dict[str, type[GuidanceBackend] | type[XgrammarBackend]] = {
    XGRAMMAR: XgrammarBackend,
    GUIDANCE: GuidanceBackend,
}


class Uncompiled(OwnGrammar):
    """Stand for the grammar of a request that waits to be compiled; nothing is asked of it."""

    mode = ""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Raise: the request does not run yet."""
        raise AssertionError("a request runs with a grammar that was compiled")

    def is_terminated(self) -> bool:
        """Raise: the request does not run yet."""
        raise AssertionError("a request runs with a grammar that was compiled")


class Backends(StructuredOutputBackend):
    """Create the backends of an engine at first use."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: TokenizerLike) -> None:
        vocab_size = vllm_config.model_config.get_vocab_size()
        super().__init__(vllm_config, tokenizer=tokenizer, vocab_size=vocab_size)
        self._made: dict[str, StructuredOutputBackend] = {}
        self._making = threading.Lock()
        # It keeps what it compiles in a field until it has.
        self._guidance = threading.Lock()

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        """Compile nothing: vLLM does not say whose grammar it is, see :meth:`compile`."""
        return Uncompiled()

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Raise: no step of a canvas reads a bitmask of vLLM's."""
        raise AssertionError("a canvas has no bitmask of vLLM's")

    def destroy(self) -> None:
        """End the backends that were made."""
        for backend in self._made.values():
            backend.destroy()

    def compile(self, request: Request) -> StructuredOutputGrammar:
        """Compile a grammar by the request's own backend. Raises what the compiler raises."""
        params, ours = request.sampling_params, request.structured_output_request
        assert (
            params is not None
            and params.structured_outputs is not None
            and ours is not None
        )
        asked, named = params.structured_outputs, ours.structured_output_key
        name = asked._backend
        assert name is not None
        if named[0] == StructuredOutputOptions.REGEX:
            named = (named[0], written_out(named[1]))
        if name == XGRAMMAR and asked._backend_was_auto:
            schema = (
                json.loads(named[1])
                if named[0] == StructuredOutputOptions.JSON
                else None
            )
            if loose_keyword(schema) or (
                has_rough_format(schema) and not _refusal(params)
            ):
                name = GUIDANCE
            elif (wide := _if_wide(named, schema)) is not None:
                grammar = self._compile(GUIDANCE, wide, params)
                assert isinstance(grammar, GuidanceGrammar)
                if not grammar.ll_matcher.is_error():
                    return grammar
        return self._compile(name, named, params)

    def _compile(
        self, name: str, named: StructuredOutputKey, params: SamplingParams
    ) -> StructuredOutputGrammar:
        with self._making:
            if name not in self._made:
                self._made[name] = BACKENDS[name](
                    self.vllm_config,
                    tokenizer=self.tokenizer,
                    vocab_size=self.vocab_size,
                )
        with self._guidance if name == GUIDANCE else nullcontext():
            return self._made[name].compile_grammar(*named, params.all_stop_token_ids)


def _if_wide(named: StructuredOutputKey, schema: Any) -> StructuredOutputKey | None:
    """Return a grammar of many alternatives as guidance reads it; None for other grammars."""
    kind, spec = named
    if kind == StructuredOutputOptions.JSON:
        return named if most_values(schema) > MANY else None
    if spec.count("|") < MANY:
        return None
    # A choice of so many words is too much for guidance, but not as an expression.
    asked = expression(kind.name.lower(), spec)
    return (StructuredOutputOptions.REGEX, str(asked["pattern"])) if asked else None


def choose_guidance(params: SamplingParams) -> None:
    """Take guidance where vLLM chose a backend that cannot go back.

    vLLM never asks guidance about `patternProperties`, which guidance 1.7 reads. Raises ValueError
    if guidance refuses the schema.
    """
    asked = params.structured_outputs
    if asked is None or asked._backend in BACKENDS or not asked._backend_was_auto:
        return
    if refusal := _refusal(params):
        raise ValueError(
            "structured_outputs json is a schema that neither xgrammar nor guidance reads "
            f"({refusal}): write it without."
        )
    asked._backend = GUIDANCE


def check_readable(params: SamplingParams) -> None:
    """Raise ValueError for an expression or a schema that no backend of its request reads whole."""
    asked = params.structured_outputs
    if asked is None:
        return
    if asked.regex:
        try:
            written_out(asked.regex)
        except ValueError as error:
            raise ValueError(
                f"structured_outputs regex {error}: leave it out, or write plain characters."
            ) from error
    if not asked.json or asked._backend != XGRAMMAR:
        return
    loose = loose_keyword(
        json.loads(asked.json) if isinstance(asked.json, str) else asked.json
    )
    if not loose:
        return
    if not asked._backend_was_auto:
        raise ValueError(
            f"structured_outputs json has {loose!r}, which xgrammar does not read as a whole: "
            "start with --structured-outputs-config.backend auto or guidance."
        )
    if refusal := _refusal(params):
        raise ValueError(
            f"structured_outputs json has {loose!r}, which xgrammar does not read as a whole, and "
            f"guidance refuses the schema ({refusal}): write it without."
        )


def _refusal(params: SamplingParams) -> str:
    """Return why guidance refuses a request's grammar; empty if it takes it."""
    try:
        validate_guidance_grammar(params)
    except VLLMValidationError as error:
        return str(error)
    return ""
