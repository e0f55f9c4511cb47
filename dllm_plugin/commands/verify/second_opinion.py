"""Decode by the plain loop of a strategy and policy, whatever model computes the forward."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from dllm_plugin.config.decode import DecodeConfig, RequestConfig
from dllm_plugin.config.request.arguments import request_config
from dllm_plugin.reference import full_attention, grid_blocks, prompt_blocks
from dllm_plugin.reference.full_text import FullText
from dllm_plugin.reference.full_text import Rules as FullRules
from dllm_plugin.reference.model import Forward
from dllm_plugin.reference.sub_blocks import sub_blocks
from dllm_plugin.reference.watch import Step


class Job(NamedTuple):
    """Hold what is decoded, and by which numbers."""

    prompt: list[int]
    max_tokens: int
    config: DecodeConfig
    stop: Collection[int]
    max_model_len: int

    @property
    def request(self) -> RequestConfig:
        """Return the configuration of a request that asks for nothing."""
        return request_config(self.config, {}, self.max_tokens)


class Opinion(NamedTuple):
    """Hold what a loop made of a prompt."""

    tokens: list[int]
    forwards: int


def decode(model: Forward, job: Job, watch: Callable[[Step], None]) -> Opinion:
    """Decode a prompt; `watch` is called behind each forward."""
    method = job.config.method
    if method.full_attention:
        return _full_attention(model, job, watch)
    if job.config.family.absolute_grid:
        return _grid(model, job, watch)
    return _behind_the_prompt(model, job, watch)


def blocks_of(job: Job, length: int) -> list[int]:
    """Number the blocks of the first positions; a query sees its own block and earlier ones."""
    if job.config.method.full_attention:
        return [0] * length
    start, size = len(job.prompt), job.request.block_length
    if job.config.family.absolute_grid:
        return [p // size for p in range(length)]
    return [0] * start + [1 + (p - start) // size for p in range(start, length)]


def first_stop(job: Job) -> int:
    """Return the end of what both sides compute alike in the first forward."""
    start, size = len(job.prompt), job.request.block_length
    if job.config.method.full_attention:
        return job.max_model_len
    if job.config.family.absolute_grid:
        return min((start // size + 1) * size, job.max_model_len)
    return min(start + size, job.max_model_len)


def _full_attention(model: Forward, job: Job, watch: Callable[[Step], None]) -> Opinion:
    request = job.request
    rules = FullRules(
        job.config.strategy,
        request.policy,
        request.block_length,
        request.steps,
        request.threshold,
        request.factor,
        request.eps,
        full_refresh_every=request.full_refresh_every,
        refresh_before=request.refresh_before,
        suffix_window=request.suffix_window,
    )
    text = FullText(
        *(model, job.prompt, job.max_tokens, rules, job.config.canvas_length, job.stop),
        max_model_len=job.max_model_len,
        watch=watch,
    )
    full_attention.decode(text)
    return Opinion(text.answer(), len(text.passes))


def _behind_the_prompt(
    model: Forward, job: Job, watch: Callable[[Step], None]
) -> Opinion:
    request = job.request
    text = prompt_blocks.Text(
        *(model, job.prompt, job.max_tokens, request.block_length, job.stop),
        max_model_len=job.max_model_len,
        watch=watch,
    )
    if not job.config.method.next_block:
        prompt_blocks.d2f(
            text,
            request.threshold,
            request.block_add_threshold,
            request.decoded_token_threshold,
            request.policy,
            job.config.canvas_length,
            request.max_active_blocks,
        )
        return Opinion(text.answer(), text.passes)
    numbers = (request.threshold, request.steps, request.factor, request.eps)
    prompt_blocks.block_diffusion(text, request.policy, *numbers)
    # Where the next block rides along, storing one takes no forward.
    stored = 0 if job.config.computes_next_block else text.commit_passes
    return Opinion(text.answer(), text.passes + stored)


def _grid(model: Forward, job: Job, watch: Callable[[Step], None]) -> Opinion:
    request = job.request
    rules = grid_blocks.Rules(
        threshold=request.threshold,
        steps=request.steps,
        sub_block_length=request.sub_block_length or None,
        editing_threshold=request.editing_threshold
        if request.policy in EDITING
        else None,
        max_post_steps=request.max_post_steps,
        num_to_transfer=request.num_to_transfer,
        policy=request.policy,
        factor=request.factor,
    )
    text = grid_blocks.GridText(
        *(model, job.prompt, job.max_tokens, request.block_length, job.stop),
        max_model_len=job.max_model_len,
        watch=watch,
    )
    if job.config.dedicated_commit:
        sub_blocks(text, rules)
    else:
        grid_blocks.active_blocks(text, rules, job.config.canvas_length)
    return Opinion(text.answer(), text.passes)


EDITING = ("joint_threshold",)
