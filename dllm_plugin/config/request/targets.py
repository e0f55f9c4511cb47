"""Parse and check the targets of a request: the tokens that the gaps of its template take.

One forward takes them all, so that log-probabilities are those of the targets.
"""

from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import SamplingParams

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import REQUEST_PREFIX, TARGETS, TEMPLATE
from dllm_plugin.config.request.arguments import NOT_DECODING
from dllm_plugin.config.request.template import FILL, Template, no_template
from dllm_plugin.config.validation import shown

# Parameter -> its neutral value: nothing else may decide a token, or end the text before its end.
IDLE: dict[str, Any] = {
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "min_tokens": 0,
    "bad_words": [],
    "allowed_token_ids": None,
    "logit_bias": None,
}


def targets_of(extra_args: Mapping[str, Any] | None) -> list[int] | None:
    """Return the targets of a request that was admitted; None if it has none."""
    given: list[int] | None = (extra_args or {}).get(TARGETS)
    return given


def read_targets(
    config: DecodeConfig,
    extra_args: Mapping[str, Any] | None,
    template: Template | None,
) -> list[int] | None:
    """Return the targets of a request. Raises ValueError naming what is wrong with them."""
    if TARGETS not in (extra_args or {}):
        return None
    assert extra_args is not None
    given = extra_args[TARGETS]
    if refusal := no_template(config, TARGETS):
        raise ValueError(refusal)
    if template is None:
        raise ValueError(
            f"{TARGETS} needs {TEMPLATE}, whose positions to fill (-1) they are for."
        )
    if not isinstance(given, list):
        raise ValueError(f"{TARGETS} must be a list of token ids, got {shown(given)}.")
    wanted = template.token_ids.count(FILL)
    if len(given) != wanted:
        raise ValueError(
            f"{TARGETS} holds {len(given)} tokens, but {TEMPLATE} has {wanted} positions to fill "
            "(-1): they must be as many."
        )
    for place, token in enumerate(given):
        if type(token) is not int or token < 0:
            raise ValueError(
                f"{TARGETS} must hold token ids, got {shown(token)} at place {place}."
            )
    if config.mask_token_id in given:
        raise ValueError(
            f"{TARGETS} holds the mask token (id {config.mask_token_id}), which no position takes."
        )
    return given


def check_targets(params: SamplingParams) -> None:
    """Raise ValueError naming what does not go together with targets."""
    if params.logprobs is None:
        raise ValueError(f"{TARGETS} needs logprobs: the answer says nothing else.")
    if not params.ignore_eos:
        raise ValueError(
            f"{TARGETS} needs ignore_eos: a target may be what ends a text."
        )
    for name, neutral in IDLE.items():
        value = getattr(params, name)
        if value is not None and value != neutral:
            raise ValueError(f"{name} cannot be combined with {TARGETS}: leave it out.")
    for name in params.extra_args or {}:
        if name.startswith(REQUEST_PREFIX) and name not in NOT_DECODING:
            raise ValueError(
                f"{shown(name)} has no effect with {TARGETS}, which one forward takes: leave it "
                "out."
            )
