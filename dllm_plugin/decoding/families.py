"""Describe the model families: facts that every folder may read.

Name strategies and policies, and say what decodes what: the command line must not import torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Family:
    """Describe one family of masked diffusion models."""

    name: str
    logits_shift: bool  # True: row i of the logits predicts position i + 1
    mask_tokens: tuple[str, ...]  # texts under which tokenizers know the mask
    turn_end_tokens: tuple[str, ...]  # end a turn besides the configured EOS
    # Where blocks start: after the prompt, or at multiples of their length from position 0 on.
    block_grid: Literal["prompt", "absolute"] = "prompt"
    # Trained on an absolute grid: positions of a block, unless config.json has them as `block_key`.
    block_length: int | None = None
    block_key: str | None = None
    threshold: float = 0.9  # confidence that its authors ask for
    # Of checkpoints whose cards ask for another threshold: pattern of their names, threshold.
    thresholds: tuple[tuple[str, float], ...] = ()
    # Positions that are decoded at a time within a block.
    sub_block_length: int | None = None
    # Names of its checkpoints that were trained to edit.
    edits_pattern: str | None = None
    names: str = ""  # pattern of checkpoints that have the default block length
    # What its chat template is given unless a request sets it.
    template_defaults: tuple[tuple[str, bool], ...] = ()
    unverified: bool = False  # no decode of its authors' code was compared with ours
    title: str = ""  # as its authors write it
    suffix_ends: bool = False  # trained with an EOS after the text that follows a gap
    shares_experts: bool = False  # within a block, which so has the length of training

    @property
    def absolute_grid(self) -> bool:
        """Return whether blocks lie at multiples of their length, prompt included."""
        return self.block_grid == "absolute"


LLADA = Family(
    *("llada", False, ("<|mdm_mask|>",), ("<|eot_id|>",)),
    thresholds=((r"(?i)dparallel", 0.5),),
    title="LLaDA",
)
LLADA_MOE = replace(
    LLADA,
    thresholds=(),
    mask_tokens=("<|mask|>",),
    turn_end_tokens=("<|endoftext|>", "<|role_end|>"),
    title="LLaDA-MoE",
)
# `<|dlm_pad|>` is how DiffuCoder, a Dream checkpoint, fills the rest of an answer.
DREAM = Family(
    *("dream", True, ("<|mask|>",), ("<|im_end|>", "<|dlm_pad|>")),
    title="Dream",
    suffix_ends=True,
)
# Dense repositories spell the mask in both ways, in different files.
SDAR = Family(
    *(
        "sdar",
        False,
        ("<|MASK|>", "<MASK>"),
        ("<|im_end|>",),
        "absolute",
        4,
        "block_size",
        0.85,
    ),
    names=r"(?i)sdar|trado",
    thresholds=((r"(?i)trado", 0.9),),
    title="SDAR",
)
# Its tokenizer knows no mask: config.json has the id.
RND1 = Family("rnd1", True, (), ("<|im_end|>",), title="RND1")
# Its config.json names no EOS.
LLADA2 = Family(
    *(
        "llada2",
        False,
        ("<|mask|>",),
        ("<|endoftext|>", "<|role_end|>"),
        "absolute",
        32,
        None,
        0.95,
    ),
    edits_pattern=r"(?i)llada2[._]?1",
    title="LLaDA2",
)
# Its experts are chosen by blocks, and its blocks delete and insert tokens.
LLADA22 = replace(
    LLADA2,
    name="llada22",
    shares_experts=True,
    block_key="block_size",
    names=r"",
    edits_pattern=r"",
    threshold=0.5,
    title="LLaDA2.2",
)
FAST_DLLM = Family(
    *(
        "fast_dllm_v2",
        True,
        ("|<MASK>|",),
        ("<|im_end|>",),
        "absolute",
        32,
        "bd_size",
        0.9,
    ),
    sub_block_length=8,
    title="Fast-dLLM v2",
)
DREAM_REASONER = Family(
    *("dream_reasoner", False, ("<|mask|>",), ("<|im_end|>",), "absolute", 32),
    block_key="block_size",
    names=r"(?i)dreamreasoner",
    unverified=True,
    title="DreamReasoner",
)
# Its config.json is that of an autoregressive Qwen2: users name the architecture.
OPEN_DCODER = replace(DREAM, mask_tokens=("<M>",), unverified=True, title="Open-dCoder")
# Its files do not tell whether it was trained by blocks.
A2D = Family(
    *("a2d", False, ("<|mask|>",), ("<|im_end|>", "<|eot_id|>")),
    template_defaults=(("enable_thinking", False),),
    title="A2D",
)
# Only its authors' code has the length of a block, and the mask; its template ends turns with EOS.
STABLE_DIFFCODER = Family(
    *("stable_diffcoder", False, ("<[MASK_TOKEN]>",), (), "absolute", 4),
    threshold=0.95,
    title="Stable-DiffCoder",
)
# Its config.json has the mask; its template ends turns with EOS.
NEMOTRON = Family(
    *("nemotron", False, (), ("<|im_end|>",)),
    block_length=32,
    block_key="block_size",
    names=r"(?i)nemotron",
    title="Nemotron-Labs-Diffusion",
)
# Its config.json is that of SDAR, with blocks of one position.
IDLM = Family(
    *("idlm", True, ("<|MASK|>", "<MASK>"), ("<|im_end|>",)),
    title="I-DLM",
)
WEDLM = Family(
    *("wedlm", False, ("<|mask|>", "<|MASK|>"), ("<|im_end|>",)),
    title="WeDLM",
)


# Architecture name in config.json -> family, and the class in `models/` that serves it.
SERVED: dict[str, tuple[Family, str]] = {
    "LLaDAModelLM": (LLADA, "llamas:LLaDAModelLM"),
    "LLaDAForDiffusionLM": (LLADA, "llamas:LLaDAModelLM"),
    "LLaDAMoEModelLM": (LLADA_MOE, "mixtures:Qwen3MoeDiffusion"),
    "DreamModel": (DREAM, "llamas:Qwen2Diffusion"),
    "DreamForDiffusionLM": (DREAM, "llamas:Qwen2Diffusion"),
    "SDARForCausalLM": (SDAR, "llamas:Qwen3Diffusion"),
    "SDARMoeForCausalLM": (SDAR, "mixtures:Qwen3MoeDiffusion"),
    "IDLMForCausalLM": (IDLM, "llamas:Qwen3Diffusion"),
    "WeDLMForCausalLM": (WEDLM, "llamas:Qwen3Diffusion"),
    "WeDLMBiasedForCausalLM": (WEDLM, "llamas:BiasedLlamaDiffusion"),
    "RND1LM": (RND1, "mixtures:Qwen3MoeDiffusion"),
    "LLaDA2MoeModelLM": (LLADA2, "mixtures:LLaDA2MoeModelLM"),
    "LLaDA22MoeModelLM": (LLADA22, "mixtures:LLaDA22MoeModelLM"),
    "Fast_dLLM_QwenForCausalLM": (FAST_DLLM, "llamas:Qwen2Diffusion"),
    "DreamForCausalLM": (DREAM_REASONER, "llamas:Qwen3Diffusion"),
    "OpenDCoderForDiffusionLM": (OPEN_DCODER, "llamas:Qwen2Diffusion"),
    "A2DQwen3LMHeadModel": (A2D, "llamas:Qwen3Diffusion"),
    "A2DQwen2LMHeadModel": (A2D, "llamas:Qwen2Diffusion"),
    "A2DLlamaLMHeadModel": (A2D, "llamas:LlamaDiffusion"),
    "StableDiffcoderForCausalLM": (STABLE_DIFFCODER, "llamas:LlamaDiffusion"),
    "NemotronLabsDiffusionModel": (NEMOTRON, "nemotron:NemotronLabsDiffusionModel"),
}
FAMILIES = {name: family for name, (family, _) in SERVED.items()}


D2F = "d2f"
BLOCK_DIFFUSION = "block_diffusion"
SELF_SPECULATION = "self_speculation"
SEMI_AUTOREGRESSIVE = "semi_autoregressive"
PREFIX_CACHE = "prefix_cache"
DUAL_CACHE = "dual_cache"
INTROSPECTIVE = "introspective"
CAUSAL_WINDOW = "causal_window"
# Strategy -> families that it decodes; the table of methods has a row for each.
TAKEN_BY = {
    D2F: ("llada", "dream"),
    BLOCK_DIFFUSION: (
        *("llada", "dream", "sdar", "llada2", "llada22", "dream_reasoner"),
        *("stable_diffcoder", "a2d", "nemotron", "fast_dllm_v2"),
    ),
    SELF_SPECULATION: ("nemotron",),
    INTROSPECTIVE: ("idlm",),
    CAUSAL_WINDOW: ("wedlm",),
    SEMI_AUTOREGRESSIVE: ("llada", "dream", "a2d", "rnd1"),
    PREFIX_CACHE: ("llada", "dream"),
    DUAL_CACHE: ("llada", "dream"),
}
STRATEGY_NAMES = tuple(TAKEN_BY)
POLICY_NAMES = (
    "threshold",
    "factor",
    "low_confidence",
    "entropy",
    "topk_margin",
    "random",
    "origin",
    "sequential",
    "joint_threshold",
)
FULL_ATTENTION = (SEMI_AUTOREGRESSIVE, PREFIX_CACHE, DUAL_CACHE)
# Strategies for which the bundled model takes its adapter.
ADAPTED_STRATEGIES = (D2F,)
# Families whose blocks may be denoised several at once, or by windows that load chooses.
SEVERAL = ("llada", "dream", "sdar", "llada2", "dream_reasoner", "fast_dllm_v2")
BY_FACTOR = (*SEVERAL, "stable_diffcoder", "a2d", "nemotron")
BY_THRESHOLD = (*BY_FACTOR, "llada22")
# Strategies whose active blocks all have to fit the canvas.
OF_WHOLE_BLOCKS = (BLOCK_DIFFUSION,)
DEFAULT_BLOCK = 32
# Strategies that draft: the option that is the number of drafts, and its default.
DRAFTS = {INTROSPECTIVE: ("block_length", 4), CAUSAL_WINDOW: ("window", 16)}
# What commands refuse before torch is imported: policies of a strategy, by family or ("") for all
# others. A test compares this with the table of methods.
BY_SCHEDULE = ("low_confidence", "entropy", "topk_margin", "random")
OF_LEFT = ("threshold", "factor", *BY_SCHEDULE)
OF_GRID = (*OF_LEFT, "sequential")
POLICIES_OF: dict[tuple[str, str], tuple[str, ...]] = {
    (D2F, ""): ("threshold", "entropy", "topk_margin"),
    (BLOCK_DIFFUSION, ""): OF_LEFT,
    (BLOCK_DIFFUSION, "sdar"): OF_GRID,
    (BLOCK_DIFFUSION, "dream_reasoner"): OF_GRID,
    (BLOCK_DIFFUSION, "fast_dllm_v2"): OF_GRID,
    (BLOCK_DIFFUSION, "llada2"): (*OF_GRID, "joint_threshold"),
    (BLOCK_DIFFUSION, "llada22"): ("joint_threshold",),
    (SELF_SPECULATION, ""): ("threshold",),
    (INTROSPECTIVE, ""): ("sequential",),
    (CAUSAL_WINDOW, ""): ("entropy",),
    (SEMI_AUTOREGRESSIVE, ""): OF_LEFT,
    (SEMI_AUTOREGRESSIVE, "dream"): (*OF_LEFT, "origin"),
    (SEMI_AUTOREGRESSIVE, "rnd1"): ("entropy",),
    (PREFIX_CACHE, ""): OF_LEFT,
    (DUAL_CACHE, ""): OF_LEFT,
}
# Options that only these strategies, and only these families, read; () for any.
ANY: tuple[str, ...] = ()
OF_EDITS = ((BLOCK_DIFFUSION,), ("llada2", "llada22"))
OF_SEVERAL = ((D2F, BLOCK_DIFFUSION), SEVERAL)
OF_LLADA_LOOPS = (FULL_ATTENTION, ("llada", "a2d"))
READ_BY = {
    **dict.fromkeys(
        ("full_refresh_every", "refresh_before"), (FULL_ATTENTION[1:], ANY)
    ),
    **dict.fromkeys(("top_p", "top_k"), (FULL_ATTENTION, ("dream", "rnd1"))),
    **dict.fromkeys(("window", "entropy_threshold"), ((CAUSAL_WINDOW,), ANY)),
    **dict.fromkeys(("sub_block_length", "use_block_cache"), (ANY, ("fast_dllm_v2",))),
    **dict.fromkeys(("editing_threshold", "max_post_steps"), OF_EDITS),
    **dict.fromkeys(("logits_eos_inf", "confidence_eos_eot_inf"), OF_LLADA_LOOPS),
    "position_penalty": ((CAUSAL_WINDOW,), ANY),
    "suffix_window": (FULL_ATTENTION, ("llada", "dream", "a2d")),
    "cfg_scale": ((SEMI_AUTOREGRESSIVE,), ("llada", "a2d")),
    "alg_temp": (FULL_ATTENTION, ("dream",)),
    "eps": ((BLOCK_DIFFUSION, *FULL_ATTENTION), ("dream",)),
    "entropy_temperature": ((SEMI_AUTOREGRESSIVE,), ("rnd1",)),
    "num_to_transfer": ((BLOCK_DIFFUSION,), ("llada2",)),
    "max_active_blocks": OF_SEVERAL,
    "block_add_threshold": OF_SEVERAL,
    "decoded_token_threshold": OF_SEVERAL,
    "steps": ((BLOCK_DIFFUSION, *FULL_ATTENTION), ANY),
    "factor": ((BLOCK_DIFFUSION, *FULL_ATTENTION), BY_FACTOR),
    "threshold": (ANY, BY_THRESHOLD),
    "block_length": (ANY, (*BY_THRESHOLD, "idlm", "rnd1")),
}


def check_strategy(strategy: str, family: Family) -> None:
    """Raise ValueError unless a strategy, or `auto`, decodes a family."""
    known = [name for name in TAKEN_BY if family.name in TAKEN_BY[name]]
    if strategy not in ("auto", *known):
        causal = ", which attend causally from block to block"
        raise ValueError(
            f"strategy {strategy!r} does not fit {family.name} models"
            f"{causal if family.absolute_grid else ''}; choose one of: {', '.join(known)}."
        )


def choose_strategy(strategy: str, family: Family, adapted: bool) -> tuple[str, str]:
    """Return a strategy, `auto` resolved, and why.

    Raises ValueError if it does not fit the family. `adapted`: there is a D2F adapter.
    """
    check_strategy(strategy, family)
    if strategy != "auto":
        return strategy, f"strategy {strategy!r} was asked for"
    known = [name for name in TAKEN_BY if family.name in TAKEN_BY[name]]
    if family.absolute_grid:
        why = f"{family.name} models are trained block by block"
        return BLOCK_DIFFUSION, why
    if SELF_SPECULATION in known:
        return BLOCK_DIFFUSION, "it is the loop of the authors' chat"
    if DUAL_CACHE not in known:
        own = SEMI_AUTOREGRESSIVE if SEMI_AUTOREGRESSIVE in known else known[0]
        return own, "it is the authors' own loop"
    if adapted:
        return D2F, "a D2F adapter is given"
    return DUAL_CACHE, (
        "no adapter is given: full attention with KV reuse; the authors' own loop is strategy "
        "semi_autoregressive"
    )


def refuse_policy(
    policy: str, strategy: str, family: Family, known: Iterable[str]
) -> None:
    """Raise ValueError unless a policy is known to a strategy of a family."""
    if policy not in known:
        raise ValueError(
            f"policy {policy!r} has no meaning for strategy {strategy!r} on {family.name} "
            f"models; choose one of: {', '.join(known)}."
        )


def check_policy_name(policy: str, strategy: str, family: Family) -> None:
    """Raise ValueError for a policy of other strategies; the engine knows those of new ones."""
    if not any(policy in names for names in POLICIES_OF.values()):
        return
    for name in (family.name, ""):
        if (strategy, name) in POLICIES_OF:
            refuse_policy(policy, strategy, family, POLICIES_OF[strategy, name])
            return


def surely_unread(strategy: str, family: Family) -> Iterator[str]:
    """Yield options of requests that a strategy does not read on a family; none of new ones."""
    if strategy not in {name for name, _ in POLICIES_OF}:
        return
    for name, (strategies, families) in READ_BY.items():
        is_taken = not strategies or strategy in strategies
        is_known = not families or family.name in families
        if not (is_taken and is_known):
            yield name


def refuse_one_at_a_time(wanted: str, family: Family) -> None:
    """Raise ValueError for a family that decodes its blocks one at a time."""
    if family.name not in SEVERAL:
        raise ValueError(
            f"{wanted} is not served for {family.title} models, whose blocks are decoded one at a "
            "time: leave it out."
        )


def no_gaps(wanted: str, strategy: str, family: Family) -> str:
    """Return why a model cannot have what is `wanted` with gaps; empty if a gap sees both sides."""
    full = sorted(name for name in FULL_ATTENTION if family.name in TAKEN_BY[name])
    if family.absolute_grid or not full:
        where = " from block to block" if family.absolute_grid else ""
        taken = TAKEN_BY[SEMI_AUTOREGRESSIVE]
        verified = [other for other in FAMILIES.values() if not other.unverified]
        titles = [other.title for other in verified if other.name in taken]
        return (
            f"{wanted} needs a model that sees the text after a gap; {family.title} models attend "
            f"causally{where}. Models that can: {', '.join(dict.fromkeys(titles))}."
        )
    if strategy in FULL_ATTENTION:
        return ""
    choices = " or ".join(filter(None, (", ".join(full[:-1]), full[-1])))
    return (
        f"{wanted} needs full attention: under strategy {strategy!r} a block never sees what "
        f"comes after it. Use strategy {choices}."
    )
