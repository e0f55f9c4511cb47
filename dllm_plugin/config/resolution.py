"""Resolve open options by the model's family, its checkpoint and the context.

:mod:`dllm_plugin.config.machine` resolves options by the machine and by vLLM's own options.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dllm_plugin.decoding.families import DEFAULT_BLOCK, DRAFTS, FAMILIES, Family
from dllm_plugin.decoding.method import Method
from dllm_plugin.decoding.methods import check_policy, choose_method, floating

from .adaptive import check_adaptive, check_windows, fit_canvas, windows
from .cuda_graphs import warm_up_context
from .decode import Case, DecodeConfig
from .options import Numbers, Options, check_active, check_block
from .request.arguments import RequestArguments
from .request.exclusions import refuse_options

LEAST_BLOCKS = 8  # default of D2F's max_active_blocks, unless the canvas holds more


def resolve(
    options: Options,
    architecture: str,
    max_model_len: int,
    mask_token_id: int,
    turn_end_token_ids: tuple[int, ...] = (),
    block_length: int | None = None,
    edits: bool = False,
    reserved: tuple[int, ...] = (),
    card_threshold: float | None = None,
) -> DecodeConfig:
    """Resolve all options of a served model.

    `block_length`: positions of a block in training; `edits`: the model was trained to edit;
    `reserved`: its pad and EOS token; `card_threshold`: what its card asks for. Raises ValueError
    if the canvas does not fit the context or a policy does not fit the strategy.
    """
    family = FAMILIES[architecture]
    if family.unverified and not options.allow_unverified:
        raise ValueError(
            f"{family.title} is not verified: no decode of its authors' code was compared with "
            "DiffuPlug's, so its text may be wrong. Set allow_unverified to serve it all the same."
        )
    method, policy, reason = _choose_method(options, family, edits)
    whole = options.block_length is None and method.whole_canvas
    name, default = DRAFTS.get(method.strategy, ("block_length", DEFAULT_BLOCK))
    block = getattr(options, name) or block_length or default
    canvas = _choose_canvas(options, method, block, max_model_len)
    if whole or options.block_length is None and method.full_attention:
        block = canvas if whole else min(block, canvas)
    longest = canvas - method.causal_commit
    check_block(method.strategy, family, block, block_length, longest)
    narrowest, widest = windows(options, method, family, block, canvas)
    layout = options.kv_cache_layout.replace("auto", "unified")
    return DecodeConfig(
        architecture=architecture,
        strategy=method.strategy,
        defaults=_defaults(
            options, family, method, policy, block, canvas, card_threshold
        ),
        steps=options.steps,
        canvas_length=canvas,
        commit_alone_from=options.commit_alone_from or 0,
        adaptive=options.adaptive,
        min_window=narrowest,
        max_window=widest,
        kv_cache_layout=layout,
        compile_step=bool(options.compile_step),
        vocab_parallel=bool(options.vocab_parallel),
        lora_path=options.lora_path,
        draft_adapter=options.draft_adapter,
        head_quantization=options.head_quantization,
        merged_updates=bool(options.merged_updates),
        mask_token_id=mask_token_id,
        turn_end_token_ids=turn_end_token_ids,
        reason=reason,
        whole_canvas=whole,
        edits=edits,
        reserved=_reserved(method, family, reserved),
    )


def _reserved(
    method: Method, family: Family, pad_and_eos: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the tokens that the last position of an answer may be reserved for."""
    if not method.reserves_last:
        return ()
    if not pad_and_eos:
        raise ValueError(
            f"{family.title} keeps the last position of an answer for the pad or EOS token, but "
            "config.json lacks pad_token_id or eos_token_id: add it, or pass it by --hf-overrides."
        )
    return pad_and_eos


def _defaults(
    options: Options,
    family: Family,
    method: Method,
    policy: str,
    block: int,
    canvas: int,
    card_threshold: float | None,
) -> RequestArguments:
    """Return what a request decodes with that asks for nothing."""
    blocks = options.max_active_blocks or method.blocks_by_default
    blocks = blocks or max(LEAST_BLOCKS, canvas // block)
    rule = method.policies[policy]
    threshold = options.threshold
    if threshold is None:
        threshold = rule.default("threshold", card_threshold or family.threshold)
    editing = options.editing_threshold
    if editing is None:
        editing = rule.default("editing_threshold", 0.5)
    return RequestArguments(
        **numbers_of(options) | {"editing_threshold": editing},
        policy=policy,
        threshold=threshold,
        steps=options.steps or rule.default("steps", block),
        block_length=block,
        window=block if "window" in method.reads else None,
        max_active_blocks=1 if method.full_attention else min(blocks, canvas),
        sub_block_length=options.sub_block_length or family.sub_block_length or 0,
    )


def _choose_method(
    options: Options, family: Family, edits: bool
) -> tuple[Method, str, str]:
    """Return the method of a model, its policy, and the reason of the choice."""
    method, reason = choose_method(options.strategy, family, bool(options.lora_path))
    default_policy = method.edited_policy if edits else method.default_policy
    check_adaptive(options, method.strategy, family, default_policy)
    if options.adaptive != "off":
        method = floating(method)
    policy = default_policy if options.policy == "auto" else options.policy
    check_policy(method, policy, family)
    return method, policy, reason


def numbers_of(config: Numbers) -> dict[str, Any]:
    """Return the fields that options and request configs share."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(Numbers)}


def _choose_canvas(
    options: Options, method: Method, block: int, max_model_len: int
) -> int:
    """Return the positions of a canvas. Raises ValueError if they exceed the context."""
    active = options.max_active_blocks or 1
    if options.canvas_length is not None:
        if options.canvas_length > max_model_len:
            raise ValueError(
                f"canvas_length {options.canvas_length} is longer than the context of "
                f"{max_model_len} tokens: lower canvas_length or raise max_model_len."
            )
        if method.next_block:
            check_active(active, block, options.canvas_length)
        return options.canvas_length
    if method.next_block:
        # The block that commits is computed in the same forward.
        alone = active == 1 and method.dedicated_commit
        canvas = block if alone else (active + 1) * block
    elif options.max_active_blocks is not None and not method.full_attention:
        canvas = active * block
    else:
        positions, blocks = method.canvas_by_default
        canvas = max(positions, blocks * block)
        # A causal commit also decides the position after its block.
        canvas += method.causal_commit
    return min(canvas, max_model_len)


def fit_warm_up(
    config: DecodeConfig, user: Options, max_model_len: int
) -> DecodeConfig:
    """Shorten a default canvas until vLLM's warm-up of GPUs fits the context.

    Raises ValueError if the user's canvas or block does not fit.
    """
    fits = (max_model_len - warm_up_context(0)) // 2
    if config.canvas_length <= fits:
        return config
    if config.whole_canvas and user.canvas_length is None and fits > 0:
        defaults = dataclasses.replace(config.defaults, block_length=fits)
        return dataclasses.replace(config, canvas_length=fits, defaults=defaults)
    least = config.block_length + config.method.causal_commit
    if user.canvas_length is not None or fits < least:
        raise ValueError(
            f"canvas_length {config.canvas_length} needs max_model_len "
            f"{warm_up_context(config.canvas_length)} on a GPU, got {max_model_len}: lower "
            "canvas_length or block_length, or raise max_model_len."
        )
    blocks = min(config.max_active_blocks, fits)
    defaults = dataclasses.replace(config.defaults, max_active_blocks=blocks)
    return fit_canvas(
        dataclasses.replace(config, canvas_length=fits, defaults=defaults)
    )


def check_options_read(config: DecodeConfig, given: Mapping[str, Any]) -> None:
    """Refuse given options that the resolved strategy or family never reads."""
    refuse_options(Case(config, config.defaults, given))
    check_commit_alone(config)
    check_adapters(config)
    check_windows(config, given)


def check_commit_alone(config: DecodeConfig) -> None:
    """Refuse `commit_alone_from` if steps always, or never, compute single blocks."""
    given = config.commit_alone_from
    if not given or (config.method.causal_commit and given == 1):
        return
    if config.dedicated_commit:
        raise ValueError(
            f"commit_alone_from {given} changes nothing if every block commits in a forward of "
            "its own, as with this model at max_active_blocks 1: leave it out."
        )
    if not config.computes_next_block:
        raise ValueError(
            f"commit_alone_from {given} needs the strategy 'block_diffusion', max_active_blocks 1 "
            "and a canvas_length of two blocks at least: leave it out."
        )


def check_adapters(config: DecodeConfig) -> None:
    """Refuse `draft_adapter` without drafts or beside `lora_path`, which `merged_updates` needs."""
    if config.merged_updates and not config.lora_path:
        raise ValueError(
            "merged_updates has no effect without lora_path: leave it out."
        )
    if config.draft_adapter is None:
        return
    if not (config.method.verifies and config.method.causal_commit):
        raise ValueError(
            f"draft_adapter has no effect with strategy {config.strategy!r}: leave it out, or set "
            "strategy to 'self_speculation'."
        )
    if config.lora_path:
        raise ValueError(
            "draft_adapter cannot be combined with lora_path, whose adapter is merged into every "
            "row: leave one of them out."
        )
