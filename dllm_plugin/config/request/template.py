"""Parse and check the template of a request: which positions of its answer are given.

A *gap* is a run of positions to fill, a *pin* a token that is given, the *tail* what is given
behind the last gap. The answer ends with the last gap; the tail is seen and never emitted.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from vllm.sampling_params import SamplingParams

from dllm_plugin.config.decode import DecodeConfig, RequestConfig
from dllm_plugin.config.options import FILL, TEMPLATE
from dllm_plugin.config.validation import shown
from dllm_plugin.decoding.methods import METHODS


class Template:
    """Hold the positions behind a prompt: token ids, and `FILL` for what is to be filled."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Return where the gaps start and stop."""
        ids = [0, *self.token_ids, 0]
        edges = [
            i - 1
            for i in range(1, len(ids))
            if (ids[i] == FILL) != (ids[i - 1] == FILL)
        ]
        return list(zip(edges[::2], edges[1::2], strict=True))

    @property
    def end(self) -> int:
        """Return where the last gap stops, and the answer with it."""
        return self.gaps[-1][1]

    @property
    def tail(self) -> int:
        """Return how many tokens are given behind the last gap."""
        return len(self.token_ids) - self.end

    def given_blocks(self, block_length: int) -> list[int]:
        """Return the tokens of the leading blocks that are given as a whole."""
        return self.token_ids[: self.gaps[0][0] // block_length * block_length]

    def ends(self, stop_token_ids: Iterable[int]) -> list[int]:
        """Return which of the tokens end the answer where they are decided.

        None do with several gaps, since what stands behind the first is wanted, and none that are
        given in front of a single gap.
        """
        if len(self.gaps) > 1:
            return []
        before = self.token_ids[: self.gaps[0][0]]
        return [token for token in stop_token_ids if token not in before]


def template_of(extra_args: Mapping[str, Any] | None) -> Template | None:
    """Return the template of a request that was admitted; None if it has none."""
    given = (extra_args or {}).get(TEMPLATE)
    return None if given is None else Template(given)


def no_template(config: DecodeConfig, wanted: str) -> str:
    """Return why an engine cannot serve what is `wanted`; empty if it can."""
    family = config.family
    if family.absolute_grid:
        return (
            f"{wanted} needs a model that sees the text behind a gap; {family.title} models attend "
            "causally from block to block. LLaDA, Dream and DiffuCoder can."
        )
    if config.method.full_attention:
        return ""
    full = sorted({name for (name, _), row in METHODS.items() if row.full_attention})
    return (
        f"{wanted} needs full attention: under strategy {config.strategy!r} a block never sees "
        f"what stands behind it. Serve with strategy {', '.join(full[:-1])} or {full[-1]}."
    )


def check_length(config: DecodeConfig, num_positions: int) -> None:
    """Raise ValueError if gaps and what stands behind them do not fit a canvas."""
    if num_positions > config.canvas_length:
        raise ValueError(
            f"The gaps and the text behind them take {num_positions} positions, canvas_length is "
            f"{config.canvas_length}: shorten the suffix or the gaps, or start the server with a "
            "larger canvas_length."
        )


def read_template(
    config: DecodeConfig, extra_args: Mapping[str, Any] | None
) -> Template | None:
    """Return the template of a request. Raises ValueError naming what is wrong with it."""
    if TEMPLATE not in (extra_args or {}):
        return None
    assert extra_args is not None
    given = extra_args[TEMPLATE]
    if refusal := no_template(config, TEMPLATE):
        raise ValueError(refusal)
    if not isinstance(given, list):
        raise ValueError(
            f"{TEMPLATE} must be a list of token ids, with -1 for a position to fill, got "
            f"{shown(given)}."
        )
    check_length(config, len(given))
    for place, token in enumerate(given):
        if type(token) is not int or token < FILL:
            raise ValueError(
                f"{TEMPLATE} must hold token ids, with -1 for a position to fill, got "
                f"{shown(token)} at place {place}."
            )
    if FILL not in given:
        raise ValueError(f"{TEMPLATE} holds no position to fill (-1).")
    if config.mask_token_id in given:
        raise ValueError(
            f"{TEMPLATE} holds the mask token (id {config.mask_token_id}): write -1 for a position "
            "to fill."
        )
    return Template(given)


def check_template(
    template: Template, params: SamplingParams, request: RequestConfig
) -> None:
    """Raise ValueError naming what does not go together with a template."""
    if params.max_tokens != template.end:
        raise ValueError(
            f"max_tokens is {params.max_tokens}, but the last gap of {TEMPLATE} ends at "
            f"{template.end}: they must be equal."
        )
    if request.cfg_scale > 0:
        raise ValueError(f"dllm_cfg_scale cannot be combined with {TEMPLATE}.")
    asked = params.structured_outputs
    if asked is not None and not asked.all_constraints_none():
        raise ValueError(f"structured_outputs cannot be combined with {TEMPLATE}.")
    for name in ("stop", "stop_token_ids"):
        if getattr(params, name) and len(template.gaps) > 1:
            raise ValueError(f"{name} needs a single gap, got {len(template.gaps)}.")
    stops = params.stop_token_ids or []
    if len(template.ends(stops)) < len(stops):
        raise ValueError(
            f"{TEMPLATE} gives a token of stop_token_ids in front of its gap: put it into the "
            "prompt, or leave it out of stop_token_ids."
        )
