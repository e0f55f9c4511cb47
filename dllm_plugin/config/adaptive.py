"""Resolve and check the options of floating canvases.

With `adaptive`, block-causal strategies commit all leading decided positions and decode a window of
masks after them (:mod:`dllm_plugin.decoding.floating`). Load, or the schedule of a request, chooses
how many positions a step computes.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dllm_plugin.decoding.families import FULL_ATTENTION, Family, refuse_one_at_a_time

from .options import Options
from .validation import shown

if TYPE_CHECKING:  # commands check options before vLLM and torch are imported
    from dllm_plugin.decoding.method import Method

    from .decode import DecodeConfig

CONTRACT = (
    "adaptive %s: steps compute %d to %d positions of each canvas, chosen by load, so a text "
    "depends on load and timing too; its widths are recorded, and dllm_schedule replays them."
)
UNMEASURED = (
    "Nobody has published how accurate %s is with windows of %d positions: diffuplug eval "
    "--schedule measures it, and min_window can be set by that."
)
# Names of checkpoints, and the narrowest windows whose accuracy was published (docs/widths.md).
PUBLISHED = ((r"(?i)llada-8b-base", 2), (r"(?i)sdar-8b", 6), (r"(?i)llada2\.0-mini", 6))
# Narrowest by default, without and with block training.
UNTRAINED_WINDOW, TRAINED_WINDOW = 8, 4
# Blocks of a default window, if several blocks may be denoised at once.
PARTS = 4


def check_floating(options: Options, strategy: str) -> None:
    """Refuse windows without `adaptive`, and `adaptive` under full attention."""
    if options.adaptive == "off":
        for name in ("min_window", "max_window"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"{name} {getattr(options, name)} has no effect with adaptive 'off': leave it "
                    "out, or set adaptive to 'throughput' or 'balanced'."
                )
    elif strategy in FULL_ATTENTION:
        raise ValueError(
            f"adaptive {options.adaptive!r} needs a strategy that attends from block to block, not "
            f"{strategy!r}, under which nothing that is decided has final keys: set strategy to "
            "'d2f' or 'block_diffusion', or leave adaptive out."
        )

    if options.min_window is not None and options.max_window is not None:
        _check_order(options.min_window, options.max_window)
    narrowest = options.min_window or 0
    canvas = options.canvas_length
    if canvas is not None and narrowest > canvas:
        raise ValueError(
            f"min_window {narrowest} is wider than canvas_length {canvas}: lower min_window or "
            "raise canvas_length."
        )


def _check_order(narrowest: int, widest: int) -> None:
    if narrowest > widest:
        raise ValueError(
            f"min_window {narrowest} is wider than max_window {widest}: lower min_window or raise "
            "max_window."
        )


def check_adaptive(
    options: Options, strategy: str, family: Family, default_policy: str
) -> None:
    """Refuse options that conflict with `adaptive`, and windows without `adaptive`."""
    check_floating(options, strategy)
    if options.adaptive == "off":
        return
    asked = f"adaptive {options.adaptive!r}"
    refuse_one_at_a_time(asked, family)
    policy = default_policy if options.policy == "auto" else options.policy
    if policy != "threshold":
        raise ValueError(
            f"{asked} cannot be combined with policy {policy!r}, since a window has neither a "
            "number of steps nor tokens to replace: set policy to 'threshold' or leave adaptive "
            "out."
        )
    neutral = {
        "max_active_blocks": (None, 1),
        "commit_alone_from": (None, 0),
        "sub_block_length": (None, family.sub_block_length),
        "use_block_cache": (False,),
    }
    for name, values in neutral.items():
        if getattr(options, name) not in values:
            raise ValueError(
                f"{name} {shown(getattr(options, name))} cannot be combined with {asked}, where a "
                "window takes the place of blocks: leave one of them out."
            )


def windows(
    options: Options, method: "Method", family: Family, block: int, canvas: int
) -> tuple[int, int]:
    """Return the narrowest and the widest window; zeros if canvases do not float."""
    if not method.floats:
        return 0, 0
    # A window spans several blocks only if several blocks are denoised at once.
    most = canvas if method.uses_adapter else min(block, canvas)
    usual = min(PARTS * block, most)
    widest = usual if options.max_window is None else options.max_window
    if widest > most:
        what = "canvas_length" if most == canvas else "block_length"
        raise ValueError(
            f"max_window {widest} is wider than {what} {most}: lower max_window or raise {what}."
        )
    untrained = method.untrained and not options.lora_path
    least = UNTRAINED_WINDOW if untrained else TRAINED_WINDOW
    narrowest = min(least, widest) if options.min_window is None else options.min_window
    _check_order(narrowest, widest)
    if narrowest == 1 and not family.logits_shift:
        raise ValueError(
            f"min_window 1 brings half a token a forward on {family.title} models, whose logits "
            "row i is position i: set min_window to 2, which decodes from left to right too."
        )
    return narrowest, widest


def is_published(model: str, adapter: str | None, window: int) -> bool:
    """Return whether the accuracy of a checkpoint with this narrowest window was published."""
    known = (least for name, least in PUBLISHED if re.search(name, model))
    return adapter is None and window >= min(known, default=window + 1)


def fit_canvas(config: "DecodeConfig") -> "DecodeConfig":
    """Return the configuration with windows that fit its shortened canvas."""
    widest = min(config.max_window, config.canvas_length)
    return dataclasses.replace(
        config, max_window=widest, min_window=min(config.min_window, widest)
    )


def check_windows(config: "DecodeConfig", given: Mapping[str, Any]) -> None:
    """Refuse a user's window that does not fit the shortened canvas."""
    for name in ("min_window", "max_window"):
        asked = given.get(name)
        if asked is not None and asked != getattr(config, name):
            raise ValueError(
                f"{name} {asked} does not fit the canvas of {config.canvas_length} positions that "
                "the context has room for: lower it or raise max_model_len."
            )


def without_grammars(config: "DecodeConfig") -> str:
    """Return why an engine has no grammars; empty if it has."""
    if not config.method.floats:
        return ""
    return f"cannot be combined with adaptive {config.adaptive!r}: start with adaptive 'off'"
