"""Refuse requests for structured output that a canvas or the engine cannot honour."""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.import_utils import resolve_obj_by_qualname

from dllm_plugin.config.cuda_graphs import CPU_WORKER, GRAMMAR_WORKER, OUR_WORKERS
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.grammar_refusals import check_regex, check_schema, refusal_of
from dllm_plugin.config.validation import shown

from .arguments import RequestArguments

BACKENDS = ("xgrammar", "guidance")  # they can go back, which drafts need
# Parameters of a request that no backend of vLLM 0.32 reads.
OF_THE_SERVER = (
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
)
# Kinds of structured output whose grammar may be regular.
REGULAR = ("json", "regex", "choice", "grammar")

# Fields of bodies that may have a grammar.
OF_GRAMMARS = ("structured_outputs", "response_format", "tools", "text")
# The field of a request's body that has its grammar.
SENT_AS: ContextVar[str] = ContextVar("SENT_AS", default="structured_outputs json")
# Where tools have a schema: of chats, of responses and of messages.
OF_TOOLS = (("function", "parameters"), ("parameters",), ("input_schema",))
# vLLM asks a backend that cannot serve a canvas about schemas with `patternProperties`.
OF_THAT_BACKEND = ("Failed to transform json schema into a regex", "Regex ")
# Of parameters and a backend; empty for the server's backend.
Verifier = Callable[[SamplingParams, str], None]
OF_COMPILERS = re.compile("Grammar error|Invalid grammar|Failed to transform|Regex ")


def field_of(kind: str) -> str:
    """Return where a body has a grammar of a kind: json, regex or grammar."""
    return SENT_AS.get() if kind == "json" else f"structured_outputs {kind}"


def check_expressions(asked: StructuredOutputsParams) -> None:
    """Raise ValueError for an expression, a pattern or a count that backends misread."""
    if asked.regex:
        check_regex(field_of("regex"), asked.regex)
    check_schema(SENT_AS.get(), schema_of(asked))


def schema_of(asked: StructuredOutputsParams) -> Any:
    """Return the JSON schema of a request; None without a schema."""
    return json.loads(asked.json) if isinstance(asked.json, str) else asked.json


def no_grammars(vllm_config: VllmConfig) -> str:
    """Return why an engine refuses every request for structured output; empty if it does not."""
    worker = vllm_config.parallel_config.worker_cls
    if not is_ours(worker):
        return (
            f"needs a worker that applies grammars, and worker_cls is {worker}: leave it out, or "
            f"derive it from {CPU_WORKER if current_platform.is_cpu() else GRAMMAR_WORKER}"
        )
    settings = vllm_config.structured_outputs_config
    if settings.reasoning_parser and not settings.enable_in_reasoning:
        return (
            f"holds from the first token on, also with reasoning_parser "
            f"{settings.reasoning_parser!r}: start with --structured-outputs-config."
            "enable_in_reasoning, or without a reasoning parser"
        )
    return ""


def is_ours(worker: str) -> bool:
    """Return whether a worker class is ours, or derived from ours."""
    if worker in OUR_WORKERS:
        return True
    for base in resolve_obj_by_qualname(worker).__mro__:
        if f"{base.__module__}.{base.__qualname__}" in OUR_WORKERS:
            return True
    return False


def check_structured_outputs(params: SamplingParams) -> None:
    """Raise ValueError naming what of structured_outputs cannot be honoured."""
    asked = params.structured_outputs
    if asked is None or asked.all_constraints_none():
        return
    if asked._backend not in BACKENDS:
        raise ValueError(
            f"structured_outputs needs the backend {' or '.join(BACKENDS)}, which can go back "
            f"when a draft is refused, but this request would get {asked._backend!r}: simplify "
            "the schema or start with --structured-outputs-config.backend guidance."
        )
    check_expressions(asked)
    for name in OF_THE_SERVER:
        if getattr(asked, name):
            raise ValueError(
                f"structured_outputs {name} {shown(getattr(asked, name))} of a request would be "
                "ignored, for vLLM reads it only of --structured-outputs-config: leave it out."
            )
    for token, bias in (params.logit_bias or {}).items():
        if math.isinf(bias):
            raise ValueError(
                f"logit_bias {bias} of token {token} can contradict the grammar of "
                "structured_outputs: use a finite bias."
            )


def no_automata(config: DecodeConfig) -> str:
    """Return why no request of an engine can decode by an automaton; empty if some can."""
    if config.vocab_parallel:
        return (
            "vocab_parallel is on, and an automaton reads whole rows: start without it"
        )
    if config.method.causal:
        return (
            f"strategy {config.strategy!r} of {config.architecture} decides tokens by causal "
            "forwards, from left to right: ask for 'drafts'"
        )
    if config.dedicated_commit:
        return (
            f"strategy {config.strategy!r} of {config.architecture} decides the first token of a "
            "block from a row of its own: ask for 'drafts'"
        )
    return ""


def no_automaton(
    params: SamplingParams, asked: RequestArguments, config: DecodeConfig
) -> str:
    """Return why a request cannot decode by an automaton; empty if it can."""
    output = params.structured_outputs
    assert output is not None
    if not any(getattr(output, kind) is not None for kind in REGULAR):
        return "structured_outputs is no json, regex or choice, and nothing else is regular"
    if refusal := no_automata(config):
        return refusal
    if "editing_threshold" in config.method.policies[asked.policy].reads:
        return f"policy {asked.policy!r} replaces decided tokens: choose another one"
    filters = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}
    words = "single tokens, not texts: leave"
    for name, off in filters.items():
        value = getattr(params, name)
        if params.temperature and value not in off:
            return f"{name} {shown(value)} filters {words} it out"
    for name in ("top_p", "top_k"):
        if getattr(asked, name) not in filters[name]:
            return f"top_p and top_k filter {words} dllm_{name} out"
    for name in ("logits_eos_inf", "confidence_eos_eot_inf"):
        if getattr(asked, name):
            return f"dllm_{name} bans the end of a text: leave it out"
    return ""


def check_grammars(body: bytes, verify: Verifier) -> None:
    """Raise ValueError for a grammar that no backend of vLLM's compiles, in our words.

    Args:
        verify: vLLM's check of parameters by a backend; raises VLLMValidationError.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return  # the route refuses it with the place of the error
    form = at(fields, "response_format")
    is_schema = (
        at(form, "type") == "json_schema" and at(form, "json_schema") is not None
    )
    if is_schema and at(form, "json_schema", "schema") is None:
        raise ValueError("response_format.json_schema.schema is missing: give it.")
    fields_sent = []
    for field, kind, spec in _grammars(fields):
        SENT_AS.set(field)
        fields_sent.append(field)
        asked = StructuredOutputsParams(**{kind: spec})
        try:
            verify(SamplingParams(structured_outputs=asked), "")
        except VLLMValidationError as error:
            if OF_COMPILERS.match(str(error)):
                check_expressions(asked)
                if str(error).startswith(OF_THAT_BACKEND):
                    raise ValueError(_unlike_patterns(asked, verify)) from error
                raise ValueError(refusal_of(field_of(kind), error)) from error
    if not fields_sent:
        fields_sent = [name for name in OF_GRAMMARS if at(fields, name)]
    # Read for the checks of the engine and its client, which name no field.
    SENT_AS.set(" or ".join(dict.fromkeys(fields_sent)) or OF_GRAMMARS[0])


def _unlike_patterns(asked: StructuredOutputsParams, verify: Verifier) -> str:
    """Return the sentence for a schema with patterns of names that xgrammar does not read."""
    asked._backend = None
    try:
        verify(SamplingParams(structured_outputs=asked), "guidance")
    except VLLMValidationError as error:
        return refusal_of(SENT_AS.get(), error)
    return (
        f"{SENT_AS.get()} has patternProperties beside keywords that xgrammar does not read: "
        "write it without one of them, or start with "
        "--structured-outputs-config.backend guidance."
    )


def _grammars(fields: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the field, the kind and the text of grammars that hold a reply."""
    for kind in ("regex", "grammar", "json"):
        if isinstance(spec := at(fields, "structured_outputs", kind), str):
            yield f"structured_outputs {kind}", kind, spec
    found = [
        ("response_format", at(fields, "response_format", "json_schema", "schema")),
        ("structured_outputs json", at(fields, "structured_outputs", "json")),
        ("text", at(fields, "text", "format", "schema")),
        ("output_config", at(fields, "output_config", "format", "schema")),
    ]
    choice = at(fields, "tool_choice")
    tools = at(fields, "tools")
    mode = choice.get("type") if isinstance(choice, dict) else choice
    if mode not in (None, "auto", "none"):
        chosen = at(choice, "function", "name") or at(choice, "name")
        for tool in tools if isinstance(tools, list) else ():
            names = (at(tool, "function", "name"), at(tool, "name"))
            if chosen is None or chosen in names:
                for path in OF_TOOLS:
                    found.append(("tools", at(tool, *path)))
    for field, schema in found:
        if isinstance(schema, dict):
            yield field, "json", schema


def at(value: Any, *names: str) -> Any:
    """Return what stands under names; None if an object has no such name."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value
