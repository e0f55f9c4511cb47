"""Checks of option values. Every error names the option."""

from collections.abc import Mapping
from typing import Any

from dllm_plugin.decoding.choices import (
    BLOCK_DIFFUSION,
    OF_SEVERAL_BLOCKS,
    POLICIES,
    STRATEGIES,
    policies_of,
)
from dllm_plugin.decoding.families import Family

KV_CACHE_LAYOUTS = ("auto", "unified", "distinct")
MAX_STEPS = 4096
MAX_TOP_K = 2**24  # more than any vocabulary, and exact in float32
MAX_FACTOR = 1000.0  # keeps logits that are multiplied by it within float32
LEFT_OPEN = ("compile_step", "vocab_parallel")  # None: the engine decides
SWITCHES = ("logits_eos_inf", "confidence_eos_eot_inf", "use_block_cache", *LEFT_OPEN)


def check_values(config: Any) -> None:
    """Raise ValueError naming the first option of a DecodeConfig that is out of range."""
    one_of("strategy", config.strategy, STRATEGIES)
    one_of("policy", config.policy, POLICIES)
    one_of("kv_cache_layout", config.kv_cache_layout, KV_CACHE_LAYOUTS)
    for name in ("block_length", "canvas_length", "max_active_blocks"):
        whole_number(name, getattr(config, name))
    whole_number("commit_alone_from", config.commit_alone_from, least=0)
    for name in ("steps", "sub_block_length"):
        whole_number(name, getattr(config, name))
    for name, low in (("num_to_transfer", 1), ("max_post_steps", 0)):
        value = getattr(config, name)
        if type(value) is not int or not low <= value <= MAX_STEPS:
            raise ValueError(
                f"{name} must be a whole number between {low} and {MAX_STEPS}, got {value!r}."
            )
    for name in ("steps", "sub_block_length"):
        if (getattr(config, name) or 0) > MAX_STEPS:
            raise ValueError(f"{name} must be at most {MAX_STEPS}, got {getattr(config, name)}.")
    shares = ("threshold", "block_add_threshold", "decoded_token_threshold", "top_p")
    for name in (*shares, "editing_threshold"):
        if name != "threshold" or config.threshold is not None:
            number(name, getattr(config, name), 0.0, 1.0)
    if config.top_p == 0:
        raise ValueError("top_p must be greater than 0, got 0.")
    if type(config.top_k) is not int or not 0 <= config.top_k <= MAX_TOP_K:
        raise ValueError(
            f"top_k must be a whole number between 0 and {MAX_TOP_K}, got {config.top_k!r}."
        )
    for name in ("factor", "cfg_scale", "alg_temp"):
        value = getattr(config, name)
        if name != "alg_temp" or value is not None:
            number(name, value, 0.0, MAX_FACTOR)
    number("eps", config.eps, 0.0, 1.0)
    for name in SWITCHES:
        # JSON clients of vLLM turn true into 1 on its way through `vllm_xargs`.
        allowed = (None, False, True) if name in LEFT_OPEN else (False, True)
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} must be true or false, got {getattr(config, name)!r}.")
    if config.lora_path is not None and not isinstance(config.lora_path, str):
        raise ValueError(f"lora_path must be a folder name, got {config.lora_path!r}.")


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of the choices."""
    if isinstance(value, str) and value in choices:
        return
    raise ValueError(f"{name} {value!r} is unknown; choose one of: {', '.join(choices)}.")


def whole_number(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless `value` is None or a whole number of at least `least`."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def number(name: str, value: Any, low: float, high: float) -> None:
    """Raise ValueError unless `value` is a number in [low, high]."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a number between {low} and {high}, got {value!r}.")


def check_policy(strategy: str, policy: str, family: Family) -> None:
    """Raise ValueError unless the policy means something under the strategy."""
    known = policies_of(strategy, family)
    if policy not in known:
        raise ValueError(
            f"policy {policy!r} has no meaning for strategy {strategy!r} on {family.name} models; "
            f"choose one of: {', '.join(known)}."
        )


def check_block_length(block_length: int, canvas_length: int) -> None:
    """Raise ValueError unless a block fits the canvas."""
    if block_length > canvas_length:
        raise ValueError(
            f"block_length {block_length} is longer than the canvas of {canvas_length} "
            "positions: lower block_length or raise canvas_length in additional_config."
        )


def check_block_cache(config: Any) -> None:
    """Refuse the cache of a block where nothing keeps it."""
    if config.use_block_cache and not config.commits_alone:
        raise ValueError(
            f"use_block_cache needs max_active_blocks 1, got {config.max_active_blocks}: the cache "
            "of a block is that of one block at a time."
        )
    if config.use_block_cache and config.kv_cache_layout == "distinct":
        raise ValueError(
            "use_block_cache needs kv_cache_layout 'unified': the attention of 'distinct' takes "
            "the keys of a canvas from its own pass."
        )


def check_commit_alone(config: Any) -> None:
    """Refuse to feed blocks alone where they are, or where several are denoised at once."""
    given = config.commit_alone_from
    if not given:
        return
    if config.commits_alone:
        raise ValueError(
            f"commit_alone_from {given} changes nothing where every block commits alone, as it "
            "does with this model at max_active_blocks 1: leave it out."
        )
    if not config.feeds_ahead:
        raise ValueError(
            f"commit_alone_from {given} needs the strategy 'block_diffusion', max_active_blocks 1 "
            "and a canvas_length of two blocks at least: leave it out."
        )


def check_one_block(config: Any, given: Mapping[str, Any]) -> None:
    """Refuse a given option of several open blocks where at most one is open."""
    one = config.strategy == BLOCK_DIFFUSION and config.max_active_blocks == 1
    for name in OF_SEVERAL_BLOCKS:
        if one and name in given:
            raise ValueError(
                f"{name} has no effect with max_active_blocks 1: remove it or raise "
                "max_active_blocks."
            )


def check_steps(config: Any) -> None:
    """Refuse fewer steps than a block takes."""
    if config.leads_with_one and config.steps == 1:
        raise ValueError(
            "steps must be at least 2: the first step of a block decides one position."
        )
