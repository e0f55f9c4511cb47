"""Decode a prompt by the plain loop of the engine's strategy, with any model's forward."""

import dataclasses
from collections.abc import Callable, Collection
from typing import NamedTuple

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import Numbers
from dllm_plugin.config.request.arguments import RequestArguments
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.reference.loops import LOOPS, decode
from dllm_plugin.reference.rules import (
    CAUSAL_BLOCKS,
    EXACT_BLOCKS,
    STRUCTURE,
    SUB_BLOCKS,
    Rules,
)
from dllm_plugin.reference.text import Model, Result, Step, Text

# Tokens that these options ban are not given to the plain loops.
NOT_COMPARED = ("logits_eos_inf", "confidence_eos_eot_inf")


class Job(NamedTuple):
    """Store a prompt and the options by which it is decoded."""

    prompt: list[int]
    max_tokens: int
    config: DecodeConfig
    stop: Collection[int]
    max_model_len: int

    @property
    def request(self) -> RequestArguments:
        """Return the configuration of a request without arguments of its own."""
        return request_arguments(self.config, {}, self.max_tokens)


def check(config: DecodeConfig) -> None:
    """Raise ValueError for a policy or option that the plain loops do not compute."""
    if config.method.floats:
        raise ValueError(
            f"verify compares engines with adaptive 'off', not {config.adaptive!r}"
        )
    if config.draft_adapter is not None:
        raise ValueError(
            "verify has no plain loop for draft_adapter, which changes no text: leave it out"
        )
    loop, policy = LOOPS[_name(config)], config.policy
    if policy not in loop.policies:
        raise ValueError(
            f"verify has no plain loop for policy {policy!r} with strategy "
            f"{config.strategy!r}; pass one of these by --policy: "
            f"{', '.join(loop.policies)}"
        )
    values = dataclasses.asdict(config.defaults)
    defaults = {field.name: field.default for field in dataclasses.fields(Numbers)}
    for name in sorted(config.method.options_read(policy) - _known()):
        value = values[name]
        if value != defaults.get(name):
            raise ValueError(
                f"verify has no plain loop for {name} {value!r}: leave it out"
            )


def decode_job(model: Model, job: Job, watch: Callable[[Step], None]) -> Result:
    """Decode a prompt; `watch` is called after each forward."""
    template = job.request.template
    text = Text(
        model,
        job.prompt,
        job.max_tokens,
        rules_of(job),
        job.stop,
        job.max_model_len,
        template=None if template is None else list(template.token_ids),
        watch=watch,
    )
    return decode(text)


def rules_of(job: Job) -> Rules:
    """Return the options of the plain loop."""
    config = job.config
    request = dataclasses.asdict(job.request)
    given = {name: request[name] for name in _known() if name in request}
    return Rules(
        strategy=_name(config),
        on_grid=config.family.absolute_grid,
        exact_end=config.method.exact_end,
        rounded=config.method.skips_steps,
        splits_prompt=config.method.splits_prompt,
        canvas_length=config.canvas_length,
        linear=config.method.reserves_last,
        structure=config.structure_token_ids,
        **given,
    )


def _known() -> set[str]:
    """Return the options that the plain loops compute."""
    return {field.name for field in dataclasses.fields(Rules)} - {*NOT_COMPARED}


def _name(config: DecodeConfig) -> str:
    """Return the loop of an engine's strategy."""
    method = config.method
    if method.inserts:
        return STRUCTURE
    if method.verifies or method.causal_rows:
        return config.strategy
    if method.causal_commit:
        return CAUSAL_BLOCKS
    if method.exact_end and not method.full_attention:
        return EXACT_BLOCKS
    return SUB_BLOCKS if config.dedicated_commit else config.strategy


def blocks_of(job: Job, length: int) -> list[int]:
    """Number the blocks of the first positions; a query sees its and earlier blocks."""
    config = job.config
    start = len(job.prompt)
    size = job.request.block_length
    if config.method.full_attention:
        return [0] * length
    if config.method.causal:
        # The first forward after the prompt's denoises a block, or is causal, too.
        end = length if config.method.causal_rows else start
        return [min(p, end) for p in range(length)]
    origin = config.origin(start, size)
    if config.family.absolute_grid:
        return [p // size for p in range(length)]
    after = [1 + i // size for i in range(length - origin)]
    return [0] * origin + after


def first_stop(job: Job) -> int:
    """Return the end of the positions that both sides compute in the first forward."""
    config = job.config
    start = len(job.prompt)
    size = job.request.block_length
    if config.method.full_attention or config.method.causal_rows:
        return job.max_model_len
    end = start + size
    if config.family.absolute_grid:
        end = (start // size + 1) * size
    return min(end, job.max_model_len)
