"""Define how each strategy decodes each model family: the one table of methods.

Whatever depends on strategy and family is a field of a row here, and is read from it elsewhere. A
strategy is one function in :mod:`block_causal` or :mod:`full_attention` and one row for each family
that it serves; a policy is one function and one row in :mod:`policies`.
"""

from dataclasses import replace

from . import policies
from .acceptance import tokens_of_round, tokens_of_stride
from .block_causal import (
    commit_blocks,
    plan_block_diffusion,
    plan_d2f,
    plan_edited_blocks,
    plan_sub_blocks,
)
from .causal_commit import (
    DRAFTED,
    accept_block,
    accept_prefix,
    draft_slots,
    plan_causal_commit,
    plan_self_speculation,
)
from .causal_rows import (
    IN_ORDER,
    WINDOW,
    accept_stride,
    plan_stride,
    plan_window,
    rows_of_stride,
    rows_of_window,
    stride_slots,
    window_slots,
)
from .families import (
    BLOCK_DIFFUSION,
    CAUSAL_WINDOW,
    D2F,
    DUAL_CACHE,
    INTROSPECTIVE,
    PREFIX_CACHE,
    SELF_SPECULATION,
    SEMI_AUTOREGRESSIVE,
    Family,
    choose_strategy,
    refuse_policy,
)
from .floating import plan_floating
from .full_attention import (
    commit_refreshed,
    plan_current_block,
    plan_first_position,
    span_dual_cache,
    span_prefix_cache,
    span_semi_autoregressive,
)
from .method import Method
from .structure import STRUCTURED_BLOCKS

OF_REFRESHES = frozenset({"full_refresh_every", "refresh_before"})
# A bidirectional prompt is one piece.
PROMPT = frozenset({"chunked_prefill", "prefix_caching"})
WITHOUT_ADAPTER = (
    "LLaDA and Dream checkpoints were trained with full attention, and no adapter is given: "
    "decoded block by block LLaDA-8B-Instruct solves 24.6 % of GSM8K instead of 77.5 % (arXiv "
    "2502.09992, appendix B.4). Strategy dual_cache keeps full attention."
)
d2f = Method(
    strategy=D2F,
    plan=plan_d2f,
    commit=commit_blocks,
    policies=policies.D2F,
    uses_adapter=True,
    untrained=WITHOUT_ADAPTER,
    blocks_by_default=None,
    canvas_by_default=(128, 4),
    refuses=PROMPT,
)
prompt_blocks = Method(
    strategy=BLOCK_DIFFUSION,
    plan=plan_block_diffusion,
    commit=commit_blocks,
    policies=policies.PROMPT_BLOCKS,
    untrained=WITHOUT_ADAPTER,
    next_block=True,
    refuses=PROMPT,
)
grid_blocks = replace(
    prompt_blocks, policies=policies.GRID_BLOCKS, untrained="", refuses=frozenset()
)
edited_blocks = replace(
    grid_blocks,
    plan=plan_edited_blocks,
    policies=policies.EDITED_BLOCKS,
    edited_policy="joint_threshold",
    edits=True,
)
structured_blocks = replace(
    edited_blocks,
    policies=STRUCTURED_BLOCKS,
    default_policy="joint_threshold",
    inserts=True,
    tempered=False,
)
sub_blocks = replace(
    grid_blocks,
    plan=plan_sub_blocks,
    dedicated_commit=True,
    reads=frozenset({"sub_block_length", "use_block_cache"}),
)
# Stable-DiffCoder `generate_block`
left_blocks = replace(
    grid_blocks,
    policies=policies.OF_LEFT,
    exact_end=True,
    tempered=False,
    reads=frozenset({"steps"}),
)
introspective = Method(
    strategy=INTROSPECTIVE,
    plan=plan_stride,
    commit=commit_blocks,
    accept=accept_stride,
    policies=IN_ORDER,
    default_policy="sequential",
    edited_policy="sequential",
    verifies=True,
    dedicated_commit=True,
    rows=rows_of_stride,
    slots=stride_slots,
    scheduler="drafts",
    drafted=tokens_of_stride,
    canvas_by_default=(0, 2),
)
# WeDLM `wedlm_decoder.py`
causal_window = Method(
    strategy=CAUSAL_WINDOW,
    plan=plan_window,
    commit=commit_blocks,
    policies=WINDOW,
    default_policy="entropy",
    edited_policy="entropy",
    rows=rows_of_window,
    slots=window_slots,
    reorders=True,
    tempered=False,
    canvas_by_default=(0, 2),
    reads=frozenset({"window"}),
)
# dLLM `bd3lm.py`
rounded_blocks = replace(
    left_blocks,
    policies=policies.OF_LEFT_ROUNDED,
    default_policy="low_confidence",
    skips_steps=True,
    splits_prompt=True,
    hides_pad=True,
)
# Nemotron-Labs-Diffusion `generate`
causal_blocks = replace(
    left_blocks,
    plan=plan_causal_commit,
    accept=accept_block,
    exact_end=False,
    next_block=False,
    canvas_by_default=(0, 1),
)
# Nemotron-Labs-Diffusion `linear_spec_generate`
self_speculation = replace(
    causal_blocks,
    strategy=SELF_SPECULATION,
    plan=plan_self_speculation,
    accept=accept_prefix,
    verifies=True,
    slots=draft_slots,
    scheduler="drafts",
    drafted=tokens_of_round,
    policies=DRAFTED,
    tempered=True,
    reads=frozenset(),
)
semi_autoregressive = Method(
    strategy=SEMI_AUTOREGRESSIVE,
    plan=plan_current_block,
    commit=commit_refreshed,
    policies=policies.OF_LEFT,
    default_policy="low_confidence",
    span=span_semi_autoregressive,
    keeps_kv=False,
    logits="masked",
    scheduler="refresh",
    canvas_by_default=(256, 1),  # what one refresh computes after the prompt
    tempered=False,  # LLaDA `generate.py`
    reads=frozenset(
        {
            "steps",
            "logits_eos_inf",
            "confidence_eos_eot_inf",
            "cfg_scale",
            "suffix_window",
        }
    ),
    refuses=PROMPT | {"full_graphs"},
)
# dLLM `mdlm.py`
rounded_loop = replace(
    semi_autoregressive,
    policies=policies.OF_LEFT_ROUNDED,
    exact_end=True,
    skips_steps=True,
)
prefix_cache = replace(
    semi_autoregressive,
    strategy=PREFIX_CACHE,
    default_policy="threshold",
    span=span_prefix_cache,
    keeps_kv=True,
    reads=semi_autoregressive.reads - {"cfg_scale"} | OF_REFRESHES,
    computes_rest=True,
    refuses=PROMPT,
)
dual_cache = replace(
    prefix_cache, strategy=DUAL_CACHE, span=span_dual_cache, computes_rest=False
)
DREAM_READS = frozenset({"steps", "top_p", "top_k", "suffix_window"})
dream_loop = replace(
    semi_autoregressive,
    policies=policies.DREAM_LOOP,
    default_policy="entropy",
    whole_canvas=True,  # its authors decode the whole text as one block
    tempered=True,  # Dream `sample_tokens`
    top_p_first=True,
    reads=DREAM_READS,
)

rnd1_loop = replace(
    dream_loop,
    policies=policies.RND1_LOOP,
    edited_policy="entropy",
    top_p_first=False,  # RND1 `diffusion_sample` filters by top-k first
    reserves_last=True,
    reads=frozenset({"steps", "top_p", "top_k"}),
)


def shifted(cached: Method) -> Method:
    """Return the method for Dream, whose logits row i predicts position i + 1.

    Only a refresh decides the first position of a block: later steps do not compute its row.
    """
    return replace(
        cached,
        plan=plan_first_position,
        policies=policies.OF_LEFT_IN_TIME,
        least_steps=2,
        tempered=dream_loop.tempered,
        top_p_first=dream_loop.top_p_first,
        reads=DREAM_READS | OF_REFRESHES,
    )


def floating(method: Method) -> Method:
    """Return a block-causal method with floating canvases: see :mod:`decoding.floating`."""
    positions, blocks = method.canvas_by_default
    return replace(
        method,
        plan=plan_floating,
        policies=policies.FLOATING,
        default_policy="threshold",
        edited_policy="threshold",
        scheduler="floating",
        floats=True,
        next_block=False,
        dedicated_commit=False,
        edits=False,
        blocks_by_default=1,
        canvas_by_default=(positions, max(1, blocks)),
        reads=frozenset(),
    )


METHODS: dict[tuple[str, str], Method] = {
    (D2F, "llada"): d2f,
    (D2F, "dream"): d2f,
    (BLOCK_DIFFUSION, "llada"): prompt_blocks,
    (BLOCK_DIFFUSION, "dream"): replace(
        prompt_blocks, policies=policies.PROMPT_BLOCKS_IN_TIME
    ),
    (BLOCK_DIFFUSION, "sdar"): grid_blocks,
    (BLOCK_DIFFUSION, "llada2"): edited_blocks,
    (BLOCK_DIFFUSION, "llada22"): structured_blocks,
    (BLOCK_DIFFUSION, "dream_reasoner"): grid_blocks,
    (BLOCK_DIFFUSION, "stable_diffcoder"): left_blocks,
    (BLOCK_DIFFUSION, "a2d"): rounded_blocks,
    (BLOCK_DIFFUSION, "nemotron"): causal_blocks,
    (SELF_SPECULATION, "nemotron"): self_speculation,
    (INTROSPECTIVE, "idlm"): introspective,
    (CAUSAL_WINDOW, "wedlm"): causal_window,
    (BLOCK_DIFFUSION, "fast_dllm_v2"): sub_blocks,
    (SEMI_AUTOREGRESSIVE, "llada"): semi_autoregressive,
    (SEMI_AUTOREGRESSIVE, "dream"): dream_loop,
    (SEMI_AUTOREGRESSIVE, "a2d"): rounded_loop,
    (SEMI_AUTOREGRESSIVE, "rnd1"): rnd1_loop,
    (PREFIX_CACHE, "llada"): prefix_cache,
    (PREFIX_CACHE, "dream"): shifted(prefix_cache),
    (DUAL_CACHE, "llada"): dual_cache,
    (DUAL_CACHE, "dream"): shifted(dual_cache),
}


def methods_of(family: Family) -> dict[str, Method]:
    """Return the strategies that decode a family as it was trained, or approximately so."""
    rows = METHODS.items()
    return {strategy: row for (strategy, name), row in rows if name == family.name}


def choose_method(strategy: str, family: Family, adapted: bool) -> tuple[Method, str]:
    """Return the method of a strategy, `auto` resolved, and why.

    Raises ValueError if the strategy does not fit the family. `adapted`: there is a D2F adapter.
    """
    chosen, why = choose_strategy(strategy, family, adapted)
    return METHODS[chosen, family.name], why


def check_policy(method: Method, policy: str, family: Family) -> None:
    """Raise ValueError unless the strategy supports the policy."""
    refuse_policy(policy, method.strategy, family, method.policies)
