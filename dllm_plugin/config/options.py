"""Declare the options of the engine: limits, defaults and one sentence each.

Options that requests may set too are fields of :class:`Numbers`, described by the metadata of the
field. Arguments that only requests have are in
:mod:`dllm_plugin.config.request.arguments`. The tables of docs/options.md are generated from both.
Imports neither torch nor vLLM: the command line reads this.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dllm_plugin.decoding.families import (
    DRAFTS,
    POLICY_NAMES,
    STRATEGY_NAMES,
    Family,
)

from .validation import (
    Check,
    Choice,
    Flag,
    Number,
    Text,
    WholeNumber,
    did_you_mean,
    shown,
)

KV_CACHE_LAYOUTS = ("auto", "unified", "distinct")
HEAD_QUANTIZATIONS = ("none", "fp8", "int8")
ADAPTIVE = ("off", "throughput", "balanced")
MAX_STEPS = 4096
MAX_TOP_K = 2**24  # more than any vocabulary, and exact in float32
MAX_POSITIONS = 2**31 - 1  # more than any context
MAX_FACTOR = 1000.0  # keeps logits that are multiplied by it within float32
REQUEST_PREFIX = "dllm_"
FILL = -1  # a position to fill in a template


@dataclass(frozen=True)
class Option:
    """Describe an option of the engine or an argument of a request.

    check    raises ValueError for a value out of range
    doc      what the option does, in one sentence
    default  the default in words, if it depends on the model or on other options
    request  a request may set the option, as ``dllm_`` and its name
    column   the step reads the value per request, from `RequestTable.numbers`
    off      values without effect, which any strategy accepts
    needs    field of `Method` that has to be true for an argument that no table of methods lists
    debug    only tests and benchmarks set the option
    withholds  another value than the default may keep positions masked that the policy takes
    """

    check: Check
    doc: str
    default: str = ""
    request: bool = False
    column: bool = False
    off: tuple[Any, ...] = ()
    needs: str = ""
    debug: bool = False
    withholds: bool = False


def option(default: Any, check: Check, doc: str, **rest: Any) -> Any:
    """Declare a field; `rest` are fields of :class:`Option`, `words` its default in words."""
    words = rest.pop("words", "")
    metadata = {"option": Option(check, doc, words, **rest)}
    return dataclasses.field(default=default, metadata=metadata)


def number(default: Any, check: Check, doc: str, **rest: Any) -> Any:
    """Declare a field that a request may set and that the step reads per request."""
    return option(default, check, doc, request=True, column=True, **rest)


def positions(doc: str, words: str) -> Any:
    """Declare a number of positions that a request may set; None: all of them."""
    check = WholeNumber(0, MAX_POSITIONS, open=True)
    return option(None, check, doc, words=words, request=True, off=(None,))


@dataclass(frozen=True)
class Numbers:
    """Store numbers and switches that a request may set, with defaults for every strategy."""

    factor: float = number(
        1.0, Number(0.0, MAX_FACTOR), "Number of the policy `factor`."
    )
    eps: float = number(1e-3, Number(0.0, 1.0), "End of Dream's time schedule.")
    alg_temp: float | None = number(
        None,
        Number(0.0, MAX_FACTOR, optional=True),
        "Sample positions from `softmax(score / alg_temp)`; 0: take the best.",
        words="the best",
        off=(None, 0),
    )
    top_p: float = number(
        1.0,
        Number(0.0, 1.0, above=True),
        "Top-p filter at temperature 0, at which vLLM drops its own.",
        off=(1,),
    )
    top_k: int = number(
        0,
        WholeNumber(0, MAX_TOP_K),
        "Top-k filter at temperature 0; 0: off.",
        off=(0,),
    )
    entropy_temperature: float = number(
        1.0,
        Number(0.0, MAX_FACTOR, above=True),
        "Temperature at which the entropies of greedy requests are read.",
        off=(1,),
    )
    cfg_scale: float = number(
        0.0,
        Number(0.0, MAX_FACTOR),
        "Scale of classifier-free guidance; 0: off.",
        off=(0,),
    )
    logits_eos_inf: bool = number(False, Flag(), "Never propose EOS.", off=(False,))
    confidence_eos_eot_inf: bool = number(
        False, Flag(), "EOS and end of turn have confidence 0.", off=(False,)
    )
    block_add_threshold: float = number(
        0.1,
        Number(0.0, 1.0),
        "Decided share of the last block that opens the next block.",
    )
    decoded_token_threshold: float = number(
        0.95,
        Number(0.0, 1.0),
        "Decided share of a block that fully activates the next block.",
    )
    entropy_threshold: float | None = number(
        0.4,
        Number(0.0, MAX_FACTOR, optional=True),
        "Entropy below which a position is unmasked.",
    )
    position_penalty: float = number(
        0.02,
        Number(0.0, MAX_FACTOR),
        "Added to the entropy for each position after the first mask.",
    )
    editing_threshold: float | None = number(
        None,
        Number(0.0, 1.0, optional=True),
        "Confidence above which a decided token is replaced.",
        words="0.5; LLaDA2.2 0",
    )
    max_post_steps: int = number(
        16,
        WholeNumber(0, MAX_STEPS),
        "Most steps of a block without masks that may replace tokens; a request may ask for 4 "
        "per position of the block, at least 64.",
    )
    num_to_transfer: int = number(
        1, WholeNumber(1, MAX_STEPS), "Positions that a step unmasks at least."
    )
    use_block_cache: bool = number(
        False,
        Flag(),
        "Fast-dLLM v2: trust the KV of other sub-blocks within a block.",
        off=(False,),
    )
    full_refresh_every: int = option(
        1,
        WholeNumber(1, MAX_STEPS),
        "One of so many refreshes computes everything.",
        request=True,
        off=(1,),
    )
    refresh_before: int | None = positions(
        "Positions before its block at which any other refresh starts.",
        "where the answer starts",
    )
    suffix_window: int | None = positions(
        "Positions after the current block that exist.", "the whole canvas"
    )


@dataclass(frozen=True)
class Options(Numbers):
    """Store the options of ``additional_config={"dllm": {...}}``; None is resolved later."""

    policy: str = option(
        "auto",
        Choice(("auto", *POLICY_NAMES)),
        "Which masked positions take their proposal.",
        request=True,
    )
    threshold: float | None = number(
        None,
        Number(0.0, 1.0, optional=True),
        "Confidence from which a position is unmasked.",
        words="what the model's authors ask for (`diffuplug doctor MODEL` shows it), else 0.9",
    )
    steps: int | None = option(
        None,
        WholeNumber(1, MAX_STEPS, open=True),
        "Denoising steps per block; a request may ask for 4 per position of the block, at least "
        "64.",
        words="`block_length`",
        request=True,
    )
    block_length: int | None = option(
        None,
        WholeNumber(1, MAX_POSITIONS, open=True),
        "Positions of a block.",
        words="what the model was trained with, else 32; Dream in `semi_autoregressive`: the "
        "canvas",
        request=True,
    )
    window: int | None = option(
        None,
        WholeNumber(1, MAX_POSITIONS, open=True),
        "Positions of the window.",
        words="16",
        request=True,
    )
    max_active_blocks: int | None = number(
        None,
        WholeNumber(1, MAX_POSITIONS, open=True),
        "Blocks of a request that are denoised at once.",
        words="`d2f`: what fits the canvas, at least 8; else 1",
        off=(1,),
    )
    sub_block_length: int | None = number(
        None,
        WholeNumber(1, MAX_STEPS, open=True),
        "Fast-dLLM v2: positions of a block that are decoded at a time.",
        words="8",
    )
    strategy: str = option(
        "auto",
        Choice(("auto", *STRATEGY_NAMES)),
        "What a step computes, and when blocks commit.",
    )
    canvas_length: int | None = option(
        None,
        WholeNumber(1, MAX_POSITIONS, open=True),
        "Positions of the canvas.",
        words="full attention 256, `d2f` the larger of 128 and four blocks, `block_diffusion` "
        "the active blocks and one more (Fast-dLLM v2: one block)",
    )
    adaptive: str = option(
        "off",
        Choice(ADAPTIVE),
        "Block-causal strategies: choose by load how many positions a step computes.",
    )
    min_window: int | None = option(
        None,
        WholeNumber(1, MAX_POSITIONS, open=True),
        "Fewest positions that `adaptive` may choose.",
        words="8; trained by blocks or with an adapter: 4",
    )
    max_window: int | None = option(
        None,
        WholeNumber(1, MAX_POSITIONS, open=True),
        "Most positions that `adaptive` may choose.",
        words="`d2f`: four blocks; else a block",
    )
    kv_cache_layout: str = option(
        "auto",
        Choice(KV_CACHE_LAYOUTS),
        "Order of keys and values inside a page; `auto` is `unified`, vLLM's own.",
    )
    lora_path: str | None = option(
        None,
        Text(),
        "D2F adapter (PEFT folder) that is merged into the weights.",
        words="none",
    )
    draft_adapter: str | None = option(
        None,
        Text(),
        "`self_speculation`: adapter (PEFT folder) that is applied to drafts only.",
        words="none",
    )
    head_quantization: str = option(
        "none",
        Choice(HEAD_QUANTIZATIONS),
        "GPUs: store the LM head in 8 bits, with a scale per row; activations are scaled per row "
        "too.",
    )
    allow_unverified: bool = option(
        False,
        Flag(),
        "Serve DreamReasoner or Open-dCoder, whose authors' code was never compared with ours.",
    )
    commit_alone_from: int | None = option(
        None,
        WholeNumber(0, MAX_POSITIONS, open=True),
        "Running requests from which `block_diffusion` takes single-block steps; 0: never.",
        words="if it pays",
        debug=True,
    )
    compile_step: bool | None = option(
        None,
        Flag(optional=True),
        "GPUs: compile what a step does around its logits.",
        words="if vLLM compiles the model",
        debug=True,
    )
    vocab_parallel: bool | None = option(
        None,
        Flag(optional=True),
        "Tensor parallelism: each rank proposes from its own columns of the logits.",
        words="on for several ranks without `enable_lora`",
        debug=True,
    )
    merged_updates: bool = option(
        False,
        Flag(),
        "Weights sent to the running model contain the adapter of `lora_path`.",
        debug=True,
    )

    @classmethod
    def from_user(cls, given: Mapping[str, Any]) -> "Options":
        """Check keys and values of a user. Raises ValueError with one sentence."""
        unknown = sorted(set(given) - set(OPTIONS))
        if unknown:
            raise ValueError(
                f"Unknown dllm option {shown(unknown[0])}; "
                f"known options: {', '.join(sorted(OPTIONS))}"
                f"{did_you_mean(unknown[0], OPTIONS)}."
            )
        for name, value in given.items():
            OPTIONS[name].check(name, value)
        return cls(**given)


OPTIONS: dict[str, Option] = {
    f.name: f.metadata["option"] for f in dataclasses.fields(Options)
}
REQUEST_FIELDS = tuple(name for name, known in OPTIONS.items() if known.request)
COLUMNS = tuple(name for name, known in OPTIONS.items() if known.column)


def does_nothing(name: str, value: Any) -> bool:
    """Return whether an option has no effect at this value."""
    return value in OPTIONS[name].off


def check_active(active: int, block: int, canvas: int) -> None:
    """Raise ValueError for several blocks that do not fit a canvas together."""
    if active > 1 and active * block > canvas:
        raise ValueError(
            f"max_active_blocks {active} of {block} positions do not fit canvas_length "
            f"{canvas}: lower max_active_blocks or raise canvas_length."
        )


def check_block(
    strategy: str, family: Family, block: int, trained: int | None, canvas: int | None
) -> None:
    """Raise ValueError unless a block, or drafts and the tokens before them, fit the canvas.

    Blocks that share experts have the length of training. A canvas of None is chosen later.
    """
    name, _ = DRAFTS.get(strategy, ("block_length", 0))
    if canvas is not None and strategy in DRAFTS and 2 * block > canvas:
        raise ValueError(
            f"{name} {block} needs a canvas of {2 * block} positions, got {canvas}: lower {name}, "
            "or raise canvas_length in additional_config or max_model_len."
        )
    if canvas is not None and block > canvas:
        raise ValueError(
            f"block_length {shown(block)} is longer than the canvas of {canvas} positions: "
            "lower block_length or raise canvas_length in additional_config."
        )
    if family.shares_experts and block != trained:
        raise ValueError(
            f"block_length {block} is not the {trained} of this model, whose blocks share "
            "experts: leave block_length out."
        )
