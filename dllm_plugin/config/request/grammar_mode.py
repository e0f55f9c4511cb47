"""Parse and check how a request with a grammar decodes: by checked drafts or by an automaton."""

from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import SamplingParams

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import GRAMMAR
from dllm_plugin.config.request.arguments import request_config
from dllm_plugin.config.validation import shown

AUTO, DRAFTS, AUTOMATON = "auto", "drafts", "automaton"
WAYS = (AUTO, DRAFTS, AUTOMATON)
# Kinds of structured output whose grammar may be regular.
REGULAR = ("json", "regex", "choice", "grammar")


def grammar_way(extra_args: Mapping[str, Any] | None) -> str:
    """Return how a request that was admitted decodes."""
    way: str = (extra_args or {}).get(GRAMMAR, AUTO)
    return way


def check_grammar_way(params: SamplingParams, config: DecodeConfig) -> None:
    """Raise ValueError if a request cannot decode in the way that it asks for."""
    if GRAMMAR not in (params.extra_args or {}):
        return
    way, asked = grammar_way(params.extra_args), params.structured_outputs
    if way not in WAYS:
        raise ValueError(
            f"{GRAMMAR} must be one of {', '.join(WAYS)}, got {shown(way)}."
        )
    if asked is None or asked.all_constraints_none():
        raise ValueError(
            f"{GRAMMAR} has no effect without structured_outputs: leave it out."
        )
    refusal = no_automaton(params, config)
    if way == AUTOMATON and refusal:
        raise ValueError(f"{GRAMMAR} {AUTOMATON!r} cannot be honoured: {refusal}.")


def no_automata(config: DecodeConfig) -> str:
    """Return why no request of an engine can decode by an automaton; empty if some can."""
    if config.vocab_parallel:
        return (
            "vocab_parallel is on, and an automaton reads whole rows: start without it"
        )
    if config.dedicated_commit:
        return (
            f"strategy {config.strategy!r} of {config.architecture} decides the first token of a "
            "block from a row of its own: ask for 'drafts'"
        )
    return ""


def no_automaton(params: SamplingParams, config: DecodeConfig) -> str:
    """Return why a request cannot decode by an automaton; empty if it can."""
    asked = params.structured_outputs
    assert asked is not None
    if all(getattr(asked, kind) is None for kind in REGULAR):
        return "structured_outputs is no json, regex or choice, and nothing else is regular"
    refusal = no_automata(config)
    if refusal:
        return refusal
    request = request_config(config, params.extra_args, params.max_tokens)
    if "editing_threshold" in config.method.policies[request.policy].reads:
        return f"policy {request.policy!r} replaces decided tokens: choose another one"
    filters = (
        {"top_p": 1.0, "top_k": (0, -1), "min_p": 0.0} if params.temperature else {}
    )
    for name, neutral in filters.items():
        value = getattr(params, name)
        if value != neutral and not (isinstance(neutral, tuple) and value in neutral):
            return (
                f"{name} {shown(value)} filters single tokens, not texts: leave it out"
            )
    for name, neutral in {"top_p": 1.0, "top_k": 0}.items():
        if getattr(request, name) != neutral:
            return f"top_p and top_k filter single tokens, not texts: leave dllm_{name} out"
    for name in ("logits_eos_inf", "confidence_eos_eot_inf"):
        if getattr(request, name):
            return f"dllm_{name} bans the end of a text: leave it out"
    return ""
