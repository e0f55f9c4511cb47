"""Compile each request's grammar by the backend that suits it.

vLLM gives an engine the backend of its first request: 0.32 compiles by it whatever later requests
were checked for, and 0.33 refuses those that were checked for another one. So ours takes its place.
Closings that no automaton knows are found by a grammar's rules, which xgrammar prints.
"""

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
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

from dllm_plugin.config.grammar_refusals import refusal_of
from dllm_plugin.config.request.structured_outputs import (
    SENT_AS,
    schema_of,
)
from dllm_plugin.grammar import schemas
from dllm_plugin.grammar.chart import Chart
from dllm_plugin.grammar.networks import Unreadable
from dllm_plugin.grammar.patterns import written_anywhere, written_out
from dllm_plugin.grammar.rules import (
    FIRST_PATTERN,
    MOST_PATTERNS,
    Pattern,
    read_regex,
    read_rules,
)
from dllm_plugin.grammar.vocabulary import Vocabulary

from .automata import OwnGrammar

logger = init_logger("vllm.dllm_plugin")

# Alternatives up to which xgrammar 0.2.8 is quick: it takes 0.2 s for 5,000 and 10 s for 10,000,
# and guidance 0.3 s.
MANY = 4096
VALUES = ("enum", "const")
LOWER = ("minimum", "minLength", "minItems", "minProperties")
UPPER = ("maximum", "maxLength", "maxItems", "maxProperties")
LENGTHS = ("minLength", "maxLength")


def read_chart(
    named: StructuredOutputKey,
    vocabulary: Vocabulary,
    has_blanks: bool,
    is_closed: bool,
) -> Chart | None:
    """Return the chart of a grammar; None if its rules cannot be read.

    Args:
        has_blanks: JSON may have white space between its parts.
        is_closed: objects of JSON have no properties but those that a schema names.
    """
    from xgrammar import Grammar

    kind, spec = named
    try:
        if kind == StructuredOutputOptions.REGEX:
            return Chart(*read_regex(spec), vocabulary)
        if kind == StructuredOutputOptions.GRAMMAR:
            read = Grammar.from_ebnf if "::=" in spec else Grammar.from_lark
            return Chart(*read_rules(read(spec)), vocabulary)
        if kind == StructuredOutputOptions.STRUCTURAL_TAG:
            rules = Grammar.from_structural_tag(spec)
            return Chart(*read_rules(rules), vocabulary)
        if kind == StructuredOutputOptions.JSON_OBJECT:
            spec = '{"type": "object"}'
        elif kind != StructuredOutputOptions.JSON:
            return None
        patterns: list[Pattern] = []
        schema = json.loads(spec)
        if schemas.most_values(schema) > MANY:
            return None
        merged = _rewritten(schema, lambda inner: _without_all_of(inner, schema))
        written = _rewritten(merged, lambda inner: _marked(inner, patterns))
        grammar = Grammar.from_json_schema(
            json.dumps(written, ensure_ascii=False),
            any_whitespace=has_blanks,
            separators=None if has_blanks else (",", ":"),
            strict_mode=is_closed,
        )
        return Chart(*read_rules(grammar, patterns), vocabulary)
    except (ValueError, TypeError, RuntimeError) as error:
        logger.debug("A grammar without a chart: %s", error)
        return None


def _rewritten(schema: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a schema with each schema inside changed, the innermost first."""
    if isinstance(schema, list):
        return [_rewritten(inner, change) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    written = {}
    for name, inner in schema.items():
        written[name] = inner if name in VALUES else _rewritten(inner, change)
    return change(written)


def _without_all_of(written: dict[str, Any], root: Any) -> Any:
    """Return a schema with the branches of its `allOf` merged, of which xgrammar reads none."""
    branches = written.pop("allOf", [])
    for branch in branches if isinstance(branches, list) else []:
        found = schemas.resolved(branch, root)
        if found is not branch and "allOf" in found:
            raise Unreadable("allOf that a reference within allOf names")
        written = _merged(written, found)
    return written


def _merged(one: Any, other: Any) -> Any:
    """Return a schema that asks for what two schemas ask for, roughly."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one
    merged: dict[str, Any] = dict(one)
    for name, value in other.items():
        mine: Any = merged.get(name, value)
        if name == "required":
            value = list(dict.fromkeys([*mine, *value]))
        elif name in LOWER:
            value = max(mine, value)
        elif name in UPPER:
            value = min(mine, value)
        elif name == "pattern" and _listed(value):
            value = [*_listed(mine), *_listed(value)] if name in merged else value
        else:
            value = _merged(mine, value)
        merged[name] = value
    return merged


def _written_out(written: dict[str, Any]) -> Any:
    """Return a schema with its patterns written out."""
    if isinstance(text := written.get("pattern"), str):
        written["pattern"] = written_anywhere(text)
    return _renamed(written, written_anywhere)


def _renamed(written: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a schema with its patterns of property names changed."""
    properties = written.get("patternProperties")
    if isinstance(properties, dict):
        changed = {}
        for text, inner in properties.items():
            changed[change(text)] = inner
        written["patternProperties"] = changed
    return written


def _marked(written: dict[str, Any], patterns: list[Pattern]) -> Any:
    """Return a schema with a character in place of each pattern, which is added to `patterns`."""
    if texts := _listed(written.get("pattern")):
        least, most = (written.pop(name, None) for name in LENGTHS)
        least = least if isinstance(least, int) else 0
        most = most if isinstance(most, int) else None
        written["pattern"] = _mark(Pattern(tuple(texts), least, most), patterns)
    return _renamed(written, lambda text: _mark(Pattern((text,)), patterns))


def _listed(texts: Any) -> list[str]:
    """Return the patterns that a schema asks for; those of `allOf` are listed."""
    if isinstance(texts, str):
        return [texts]
    return texts if isinstance(texts, list) else []


def _mark(pattern: Pattern, patterns: list[Pattern]) -> str:
    """Add a pattern; return the character that stands for it."""
    if len(patterns) >= MOST_PATTERNS:
        raise Unreadable(f"more than {MOST_PATTERNS} patterns")
    patterns.append(pattern)
    return chr(FIRST_PATTERN + len(patterns) - 1)


XGRAMMAR, GUIDANCE = "xgrammar", "guidance"
BACKENDS: dict[str, type[GuidanceBackend] | type[XgrammarBackend]] = {
    XGRAMMAR: XgrammarBackend,
    GUIDANCE: GuidanceBackend,
}


class Uncompiled(OwnGrammar):
    """Stand for the grammar of a request that waits to be compiled; nothing is asked of it."""


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
        """Compile nothing: vLLM passes no request here, see :meth:`compile`."""
        return Uncompiled()

    def allocate_token_bitmask(self, max_num_seqs: int) -> Tensor:
        """Raise: no step of a canvas reads a bitmask of vLLM's."""
        raise AssertionError("a canvas has no bitmask of vLLM's")

    def destroy(self) -> None:
        """End the backends that were made."""
        for backend in self._made.values():
            backend.destroy()

    def compile(self, request: Request) -> StructuredOutputGrammar:
        """Compile a grammar by the request's own backend. Raises what the compiler raises."""
        params = request.sampling_params
        ours = request.structured_output_request
        assert (
            params is not None
            and params.structured_outputs is not None
            and ours is not None
        )
        asked = params.structured_outputs
        named = ours.structured_output_key
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
            if schemas.loose_keyword(schema) or (
                schemas.has_rough_format(schema) and not _refusal(params)
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
        if name == GUIDANCE and named[0] == StructuredOutputOptions.JSON:
            written = _rewritten(json.loads(named[1]), _written_out)
            named = named[0], json.dumps(written, ensure_ascii=False)
        with self._guidance if name == GUIDANCE else nullcontext():
            return self._made[name].compile_grammar(*named, params.all_stop_token_ids)


def _if_wide(named: StructuredOutputKey, schema: Any) -> StructuredOutputKey | None:
    """Return a grammar of many alternatives as guidance reads it; None for other grammars."""
    kind, spec = named
    if kind == StructuredOutputOptions.JSON:
        return named if schemas.most_values(schema) > MANY else None
    if spec.count("|") < MANY:
        return None
    # A choice of so many words is too much for guidance, but not as an expression.
    asked = schemas.expression(kind.name.lower(), spec)
    return (StructuredOutputOptions.REGEX, str(asked["pattern"])) if asked else None


def choose_guidance(params: SamplingParams) -> None:
    """Take guidance if vLLM chose a backend that cannot go back.

    vLLM never asks guidance about `patternProperties`, which guidance 1.7 reads. Raises ValueError
    if guidance refuses the schema.
    """
    asked = params.structured_outputs
    if asked is None or asked._backend in BACKENDS or not asked._backend_was_auto:
        return
    if refusal := _refusal(params):
        raise ValueError(refusal_of(SENT_AS.get(), refusal))
    asked._backend = GUIDANCE


def check_readable(params: SamplingParams) -> None:
    """Raise ValueError for a schema that no backend of its request reads whole."""
    asked = params.structured_outputs
    if asked is None or not asked.json or asked._backend != XGRAMMAR:
        return
    loose = schemas.loose_keyword(schema_of(asked))
    if not loose:
        return
    if not asked._backend_was_auto:
        raise ValueError(
            f"{SENT_AS.get()} has {loose!r}, which xgrammar does not read as a whole: "
            "start with --structured-outputs-config.backend auto or guidance."
        )
    if refusal := _refusal(params):
        raise ValueError(refusal_of(SENT_AS.get(), refusal))


def _refusal(params: SamplingParams) -> str:
    """Return why guidance refuses a request's grammar; empty if it does not."""
    try:
        validate_guidance_grammar(params)
    except VLLMValidationError as error:
        return str(error)
    return ""
