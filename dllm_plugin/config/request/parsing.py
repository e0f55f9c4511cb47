"""Parse a request's ``dllm_*`` arguments: once in each process that asks."""

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vllm.sampling_params import SamplingParams

from dllm_plugin.config.decode import Case, DecodeConfig
from dllm_plugin.config.options import FILL, OPTIONS, REQUEST_PREFIX
from dllm_plugin.config.validation import did_you_mean, shown
from dllm_plugin.decoding.methods import check_policy

from .arguments import ARGUMENTS, RequestArguments, Template
from .exclusions import refuse_arguments

# Parsed requests that a process remembers: each may have a template as long as the canvas.
REMEMBERED = 128


def request_arguments(
    config: DecodeConfig,
    extra_args: Mapping[str, Any] | None,
    max_tokens: int | None = None,
    has_grammar: bool = False,
) -> RequestArguments:
    """Return what a request decodes with: the engine's defaults with its arguments applied.

    A request with a grammar or targets has no reserved position: they decide where its text ends.
    Raises ValueError naming the argument that is unknown, out of range, without effect, or
    excluded by another argument or the engine.
    """
    given = given_arguments(extra_args)
    ends = has_grammar or "targets" in given
    reserves = bool(config.reserved) and not ends
    reads_length = config.whole_canvas or reserves or "template" in given
    length = max_tokens if reads_length else None
    try:
        # JSON tells 0 from false, which are different arguments and equal in Python.
        key = json.dumps(given)
    except (TypeError, ValueError, RecursionError):
        return _parse(config, given, length, reserves)
    return _remembered(config, key, length, reserves)


def arguments_of(config: DecodeConfig, params: SamplingParams) -> RequestArguments:
    """Return what a request decodes with, by its parameters; as :func:`request_arguments`."""
    has_grammar = params.structured_outputs is not None
    return request_arguments(config, params.extra_args, params.max_tokens, has_grammar)


def given_arguments(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of our arguments by their names without ``dllm_``."""
    given = {}
    for name, value in (extra_args or {}).items():
        if isinstance(name, str) and name.startswith(REQUEST_PREFIX):
            given[name.removeprefix(REQUEST_PREFIX)] = value
    return given


@lru_cache(maxsize=REMEMBERED)
def _remembered(
    config: DecodeConfig, given: str, max_tokens: int | None, reserves: bool
) -> RequestArguments:
    return _parse(config, json.loads(given), max_tokens, reserves)


def _parse(
    config: DecodeConfig,
    given: Mapping[str, Any],
    max_tokens: int | None,
    reserves: bool,
) -> RequestArguments:
    """Check the given values, and put them in the place of the engine's defaults."""
    for name in sorted(given):
        if name not in ARGUMENTS:
            raise ValueError(_unknown(name))
    try:
        for name, value in given.items():
            ARGUMENTS[name].check(name, value)
        if given.get("policy", "auto") != "auto":
            check_policy(config.method, given["policy"], config.family)
    except ValueError as error:
        raise ValueError(f"Request argument refused: {REQUEST_PREFIX}{error}") from None
    fields = dict(given)
    if fields.get("window"):
        fields["block_length"] = fields["window"]
    if fields.get("policy") == "auto":
        fields["policy"] = config.default_policy
    for name in ("targets", "schedule"):
        if name in fields:
            fields[name] = tuple(fields[name])
    template = _template(config, fields, max_tokens, reserves)
    if template is not None:
        fields["template"] = template
    if "template" in fields:
        # The engine's window would hide what stands after the last gap.
        fields["suffix_window"] = None
    if "block_length" not in fields and (config.whole_canvas or "template" in fields):
        most = config.canvas_length
        fields["block_length"] = min(max_tokens or most, most)
    arguments = dataclasses.replace(config.defaults, **fields)
    steps = given.get("steps", config.steps)
    if steps is None:
        policy = config.method.policies[arguments.policy]
        steps = policy.default("steps", arguments.block_length)
    blocks = arguments.max_active_blocks
    if "max_active_blocks" not in config.method.options_read(arguments.policy):
        blocks = 1
    arguments = dataclasses.replace(arguments, steps=steps, max_active_blocks=blocks)
    if given:
        refuse_arguments(Case(config, arguments, given))
    return arguments


def _unknown(name: str) -> str:
    """Return why no request has an argument of this name."""
    argument = shown(REQUEST_PREFIX + name)
    if name in OPTIONS:
        return (
            f"Request argument refused: {REQUEST_PREFIX}{name} belongs to the server, whose {name} "
            "holds for all requests: leave it out, or start the server with that "
            f"{name} in additional_config."
        )
    known = ", ".join(REQUEST_PREFIX + known for known in ARGUMENTS)
    near = did_you_mean(name, ARGUMENTS, REQUEST_PREFIX)
    return f"Unknown request argument {argument}; known: {known}{near}."


def _template(
    config: DecodeConfig,
    fields: Mapping[str, Any],
    max_tokens: int | None,
    reserves: bool,
) -> Template | None:
    """Return a request's template, with the reserved position after it, if there is one.

    Answers longer than a canvas have no reserved position.
    """
    given = tuple(fields.get("template", ()))
    if not reserves:
        return Template(given) if given else None
    last = config.reserved[bool(fields.get("add_eos_at_end"))]
    if given:
        return Template(given if given[-1] == last else (*given, last))
    length = max_tokens or 0
    if not 1 < length <= config.canvas_length:
        return None
    return Template((FILL,) * (length - 1) + (last,), ends_given=True)
