"""Declare the options that users may write, each with its limits.

A number that requests may set is one field of :class:`Numbers`: its limits, whether a request may
set it, whether the step reads it per request and at which values it does nothing stand in the
field's metadata. Imports neither torch nor vLLM: the command line reads this.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dllm_plugin.config.validation import (
    Check,
    Choice,
    Flag,
    Number,
    Text,
    WholeNumber,
    policy_choices,
    shown,
    strategy_choices,
)

KV_CACHE_LAYOUTS = ("auto", "unified", "distinct")
ADAPTIVE = ("off", "throughput", "balanced")
MAX_STEPS = 4096
MAX_TOP_K = 2**24  # more than any vocabulary, and exact in float32
MAX_POSITIONS = 2**31 - 1  # more than any context
MAX_FACTOR = 1000.0  # keeps logits that are multiplied by it within float32
REQUEST_PREFIX = "dllm_"
TEMPLATE = REQUEST_PREFIX + "template"  # see :mod:`dllm_plugin.config.request.template`
FILL = -1  # a position to fill in a template
TARGETS = REQUEST_PREFIX + "targets"  # see :mod:`dllm_plugin.config.request.targets`
SCHEDULE = REQUEST_PREFIX + "schedule"  # see :mod:`dllm_plugin.config.adaptive`
GRAMMAR = (
    REQUEST_PREFIX + "grammar"
)  # see :mod:`dllm_plugin.config.request.grammar_mode`


@dataclass(frozen=True)
class Option:
    """Hold what is known of a field besides its default.

    check    raises ValueError for a value out of range
    request  a request may set it, as ``dllm_`` and its name
    column   the step reads it per request, from `RequestTable.numbers`
    off      values at which it does nothing, so that it may be given with any strategy
    """

    check: Check
    request: bool = False
    column: bool = False
    off: tuple[Any, ...] = ()


def option(default: Any, check: Check, **rest: Any) -> Any:
    """Declare a field that a request cannot set."""
    return dataclasses.field(
        default=default, metadata={"option": Option(check, **rest)}
    )


def number(default: Any, check: Check, *off: Any) -> Any:
    """Declare a field that a request may set and the step reads from its row."""
    return option(default, check, request=True, column=True, off=off)


def positions() -> Any:
    """Declare a number of positions that a request may set and the host alone reads; None: all."""
    check = WholeNumber(0, MAX_POSITIONS, open=True)
    return option(None, check, request=True, off=(None,))


@dataclass(frozen=True)
class Numbers:
    """Hold numbers and switches with a default for every strategy; a request may set them.

    factor                   Fast-dLLM's factor
    eps                      end of Dream's time schedule
    alg_temp                 Dream: temperature of the choice of positions; None or 0: the best
    top_p, top_k             Dream: filters at temperature 0, where vLLM drops its own
    cfg_scale                LLaDA: classifier-free guidance; 0 is off
    logits_eos_inf           LLaDA: never propose EOS
    confidence_eos_eot_inf   LLaDA: no confidence in EOS and end of turn
    block_add_threshold      decided share of the last block that opens the next (tau_add)
    decoded_token_threshold  decided share that fully activates the next block (tau_act)
    editing_threshold        joint_threshold: confidence above which a token is replaced
    max_post_steps           joint_threshold: most steps of a block without masks that may edit
    num_to_transfer          joint_threshold: how many positions a step unmasks at least
    use_block_cache          Fast-dLLM v2: trust the KV of other sub-blocks within a block
    full_refresh_every       prefix_cache, dual_cache: of so many refreshes one computes everything
    refresh_before           the others start so far before their block; None: with the answer
    suffix_window            full attention: positions behind the current block that exist; None:
                             the whole canvas
    """

    factor: float = number(1.0, Number(0.0, MAX_FACTOR))
    eps: float = number(1e-3, Number(0.0, 1.0))
    alg_temp: float | None = number(
        None, Number(0.0, MAX_FACTOR, optional=True), None, 0
    )
    top_p: float = number(1.0, Number(0.0, 1.0, above=True), 1)
    top_k: int = number(0, WholeNumber(0, MAX_TOP_K), 0)
    cfg_scale: float = number(0.0, Number(0.0, MAX_FACTOR), 0)
    logits_eos_inf: bool = number(False, Flag(), False)
    confidence_eos_eot_inf: bool = number(False, Flag(), False)
    block_add_threshold: float = number(0.1, Number(0.0, 1.0))
    decoded_token_threshold: float = number(0.95, Number(0.0, 1.0))
    editing_threshold: float = number(0.5, Number(0.0, 1.0))
    max_post_steps: int = number(16, WholeNumber(0, MAX_STEPS))
    num_to_transfer: int = number(1, WholeNumber(1, MAX_STEPS))
    use_block_cache: bool = number(False, Flag(), False)
    full_refresh_every: int = option(
        1, WholeNumber(1, MAX_STEPS), request=True, off=(1,)
    )
    refresh_before: int | None = positions()
    suffix_window: int | None = positions()


@dataclass(frozen=True)
class Options(Numbers):
    """Hold what users may write: ``additional_config={"dllm": {...}}``.

    policy                   which masked positions take their proposal; `auto`: threshold, in the
                             authors' own loop (semi_autoregressive) theirs, for checkpoints trained
                             to edit joint_threshold
    threshold                confidence from which a position is unmasked (tau_conf)
    steps                    denoising steps per block; None: block_length
    block_length             positions of a block (D2F: a free inference knob); None: what the
                             checkpoint was trained with, or 32; for semi_autoregressive on Dream
                             the whole canvas
    max_active_blocks        D2F: open blocks per request; None: what fits the canvas, at least 8.
                             block_diffusion: blocks that are denoised at once; None: 1
    sub_block_length         Fast-dLLM v2: positions decoded at a time in a block; None: 8
    strategy                 what is computed per step; `auto` takes block_diffusion on an absolute
                             grid, d2f with an adapter, else dual_cache
    canvas_length            positions scheduled per request and step, for full attention the most
                             that a refresh computes behind the prompt; None: see `resolve`
    commit_alone_from        block_diffusion: from so many running requests on, steps compute a
                             single block each, and finished blocks commit in a forward of their
                             own; 0: never; None: where it pays
                             (:func:`dllm_plugin.config.machine.fewest_alone`)
    adaptive                 block-causal strategies: `throughput` and `balanced` choose by load how
                             many canvas positions steps compute (:mod:`config.adaptive`)
    min_window, max_window   the fewest and the most of them; None: see `windows`
    kv_cache_layout          `unified` is vLLM's own; `distinct` ours, with fused span attention
    compile_step             GPUs: compile what a step plans and decides around its logits; None:
                             where vLLM compiles the model
    vocab_parallel           tensor parallelism: ranks exchange results per row, not the logits;
                             None: wherever it can
    lora_path                D2F adapter (PEFT folder) merged into the weights at load
    merged_updates           weights sent to the running model contain the adapter of lora_path
    """

    policy: str = option("auto", Choice(policy_choices), request=True)
    threshold: float | None = number(None, Number(0.0, 1.0, optional=True))
    steps: int | None = option(None, WholeNumber(1, MAX_STEPS, open=True), request=True)
    block_length: int | None = option(None, WholeNumber(1, open=True), request=True)
    max_active_blocks: int | None = number(None, WholeNumber(1, open=True), 1)
    sub_block_length: int | None = number(None, WholeNumber(1, MAX_STEPS, open=True))
    strategy: str = option("auto", Choice(strategy_choices))
    canvas_length: int | None = option(None, WholeNumber(1, open=True))
    commit_alone_from: int | None = option(None, WholeNumber(0, open=True))
    adaptive: str = option("off", Choice(lambda: ADAPTIVE))
    min_window: int | None = option(None, WholeNumber(1, open=True))
    max_window: int | None = option(None, WholeNumber(1, open=True))
    kv_cache_layout: str = option("auto", Choice(lambda: KV_CACHE_LAYOUTS))
    compile_step: bool | None = option(None, Flag(optional=True))
    vocab_parallel: bool | None = option(None, Flag(optional=True))
    lora_path: str | None = option(None, Text())
    merged_updates: bool = option(False, Flag())

    @classmethod
    def from_user(cls, given: Mapping[str, Any]) -> "Options":
        """Check user keys and values. Raises ValueError with one sentence."""
        unknown = sorted(set(given) - set(OPTIONS))
        if unknown:
            raise ValueError(
                f"Unknown dllm option {shown(unknown[0])}; "
                f"known options: {', '.join(sorted(OPTIONS))}."
            )
        check_values(given)
        return cls(**given)


def check_values(given: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first value that is out of range."""
    for name, value in given.items():
        OPTIONS[name].check(name, value)


OPTIONS: dict[str, Option] = {
    f.name: f.metadata["option"] for f in dataclasses.fields(Options)
}
REQUEST_FIELDS = tuple(name for name, known in OPTIONS.items() if known.request)
COLUMNS = tuple(name for name, known in OPTIONS.items() if known.column)


def does_nothing(name: str, value: Any) -> bool:
    """Return whether an option does nothing at this value."""
    return value in OPTIONS[name].off
