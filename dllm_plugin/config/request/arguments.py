"""Parse a request's ``dllm_*`` arguments: once in each process that asks."""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from dllm_plugin.config.adaptive import check_one_length
from dllm_plugin.config.decode import DecodeConfig, RequestConfig
from dllm_plugin.config.options import (
    GRAMMAR,
    REQUEST_FIELDS,
    REQUEST_PREFIX,
    SCHEDULE,
    TARGETS,
    TEMPLATE,
    check_values,
    does_nothing,
)
from dllm_plugin.config.request.reporting import REPORT_ARGUMENTS
from dllm_plugin.config.resolution import (
    check_block_cache,
    check_block_length,
    check_one_block,
    check_policy,
    check_refresh_before,
    check_steps,
)
from dllm_plugin.config.validation import shown

HASHED = (str, bool, int, float, type(None))
FORWARDS_PER_POSITION = (
    4  # of a block that a request may ask for: more only occupy a slot
)
FORWARDS = 64  # that it may ask for however short its blocks are
REMEMBERED = 1024  # parsed requests that a process remembers
# Arguments that are read elsewhere.
NOT_DECODING = REPORT_ARGUMENTS | {TEMPLATE, TARGETS, SCHEDULE, GRAMMAR}


def request_config(
    config: DecodeConfig,
    extra_args: Mapping[str, Any] | None,
    max_tokens: int | None = None,
) -> RequestConfig:
    """Return what a request decodes with: the engine's defaults with its arguments applied.

    Raises ValueError naming the argument that is unknown, out of range, or without effect under
    the request's strategy and policy.
    """
    given = {
        name: value
        for name, value in (extra_args or {}).items()
        if str(name).startswith(REQUEST_PREFIX) and name not in NOT_DECODING
    }
    has_template = TEMPLATE in (extra_args or {})
    length = max_tokens if config.whole_canvas or has_template else None
    if not all(type(value) in HASHED for value in given.values()):
        return _parse(config, given, length, has_template)
    # Equal values of other types are other arguments: 0 is a number of tokens, False is none.
    key = tuple((name, type(value), value) for name, value in given.items())
    return _remembered(config, key, length, has_template)


@lru_cache(maxsize=REMEMBERED)
def _remembered(
    config: DecodeConfig,
    key: tuple[tuple[str, type, Any], ...],
    max_tokens: int | None,
    has_template: bool,
) -> RequestConfig:
    return _parse(
        config, {name: value for name, _, value in key}, max_tokens, has_template
    )


def _parse(
    config: DecodeConfig,
    given: Mapping[str, Any],
    max_tokens: int | None,
    has_template: bool,
) -> RequestConfig:
    fields = {key.removeprefix(REQUEST_PREFIX): value for key, value in given.items()}
    unknown = sorted(set(fields) - set(REQUEST_FIELDS))
    if unknown:
        known = [
            *(REQUEST_PREFIX + name for name in REQUEST_FIELDS),
            *sorted(NOT_DECODING),
        ]
        raise ValueError(
            f"Unknown request argument {shown(REQUEST_PREFIX + unknown[0])}; known: "
            f"{', '.join(known)}."
        )
    if fields.get("policy") == "auto":
        fields["policy"] = config.default_policy
    try:
        check_values(fields)
        request = dataclasses.replace(config.defaults, **fields)
        block = request.block_length
        if (config.whole_canvas or has_template) and "block_length" not in fields:
            block = min(max_tokens or config.canvas_length, config.canvas_length)
        if fields:
            _check(config, request, fields)
            _check_forwards(config, max(block, request.block_length), fields)
        if has_template:
            request = _seen_whole(request, fields)
    except ValueError as error:
        raise ValueError(f"Request argument refused: {REQUEST_PREFIX}{error}") from None
    method = config.method
    steps = fields.get("steps", config.steps)
    several = "max_active_blocks" in method.options_read(request.policy)
    return dataclasses.replace(
        request,
        block_length=block,
        steps=steps or method.policies[request.policy].default("steps", block),
        max_active_blocks=request.max_active_blocks if several else 1,
    )


def _seen_whole(request: RequestConfig, fields: Mapping[str, Any]) -> RequestConfig:
    """Return the request without the engine's suffix window, which would hide its template."""
    if fields.get("suffix_window") is not None:
        raise ValueError(
            f"suffix_window cannot be combined with {TEMPLATE}, which is seen whole."
        )
    return dataclasses.replace(request, suffix_window=None)


def _check(
    config: DecodeConfig, request: RequestConfig, fields: Mapping[str, Any]
) -> None:
    """Raise ValueError naming the first argument that the engine cannot honour."""
    method = config.method
    check_policy(method, request.policy, config.family)
    open_lengths = ("block_length", "sub_block_length")
    for name in open_lengths[: 2 if config.defaults.sub_block_length else 1]:
        if fields.get(name, 1) is None:
            raise ValueError(f"{name} must be a whole number of at least 1, got None.")
    if fields.get("threshold", 1) is None:
        raise ValueError("threshold must be a number between 0.0 and 1.0, got None.")
    check_block_length(request.block_length, config.canvas_length)
    most = config.max_active_blocks
    if fields.get("max_active_blocks", 1) is None or request.max_active_blocks > most:
        raise ValueError(
            f"max_active_blocks {shown(request.max_active_blocks)} exceeds the engine's "
            f"{most}: raise max_active_blocks in additional_config."
        )
    read = method.options_read(request.policy)
    check_one_length(config, fields)
    for name, value in fields.items():
        if name not in read and not does_nothing(name, value):
            raise ValueError(
                f"{name} has no effect with strategy {config.strategy!r} and policy "
                f"{request.policy!r} on {config.architecture}: remove it or choose another "
                "policy."
            )
    check_steps(config, fields.get("steps", config.steps))
    check_one_block(config, request, fields)
    check_block_cache(config, request)
    check_refresh_before(config, request)
    if fields.get("refresh_before") is not None and request.full_refresh_every == 1:
        raise ValueError(
            "refresh_before has no effect with full_refresh_every 1: remove it or raise "
            "full_refresh_every."
        )


def _check_forwards(
    config: DecodeConfig, block_length: int, fields: Mapping[str, Any]
) -> None:
    """Refuse many more forwards of a block than it has positions, unless the engine takes them."""
    own = {"steps": config.steps or 0, "max_post_steps": config.defaults.max_post_steps}
    for name, engines in own.items():
        most = max(FORWARDS_PER_POSITION * block_length, FORWARDS, engines)
        if (fields.get(name) or 0) > most:
            raise ValueError(
                f"{name} {shown(fields[name])} exceeds {most}, the largest of {FORWARDS}, "
                f"{FORWARDS_PER_POSITION} for each of the block's {block_length} positions "
                f"and the engine's own {engines}: lower {name} or raise it in additional_config."
            )
