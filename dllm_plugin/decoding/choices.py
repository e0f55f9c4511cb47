"""Which policies a strategy knows, and which options it reads with each. Plain data and sets."""

from dllm_plugin.decoding.families import Family

D2F = "d2f"
BLOCK_DIFFUSION = "block_diffusion"
SEMI_AUTOREGRESSIVE = "semi_autoregressive"
PREFIX_CACHE = "prefix_cache"
DUAL_CACHE = "dual_cache"
# Every position sees every other: KV is recomputed, at the latest when a block is done.
FULL_ATTENTION = (SEMI_AUTOREGRESSIVE, PREFIX_CACHE, DUAL_CACHE)

SCHEDULED = ("low_confidence", "entropy", "topk_margin", "random")
STRATEGIES = ("auto", D2F, BLOCK_DIFFUSION, *FULL_ATTENTION)
JOINT = "joint_threshold"
POLICIES = ("auto", "threshold", "factor", *SCHEDULED, "origin", "sequential", JOINT)

# Options that do nothing at these values, so that they may stand beside any strategy.
OFF = {
    "alg_temp": (None, 0),
    "cfg_scale": (0,),
    "logits_eos_inf": (False,),
    "confidence_eos_eot_inf": (False,),
    "top_p": (1,),
    "top_k": (0,),
    "max_active_blocks": (1,),
    "use_block_cache": (False,),
}
# What block diffusion reads only where `max_active_blocks` lets it open the next block early.
OF_SEVERAL_BLOCKS = ("block_add_threshold", "decoded_token_threshold")


def strategies_of(family: Family) -> tuple[str, ...]:
    """Strategies that decode a family as it was trained, or approximately so."""
    return (BLOCK_DIFFUSION,) if family.absolute_grid else STRATEGIES[1:]


def policies_of(strategy: str, family: Family) -> tuple[str, ...]:
    """Policies that mean something under a strategy for a family of models."""
    if strategy == D2F:
        return ("threshold", "entropy", "topk_margin")
    everywhere = ("threshold", "factor", *SCHEDULED)
    if family.absolute_grid:
        edits = (JOINT,) if family.edits_pattern else ()
        return (*everywhere, "sequential", *edits)
    # Dream's own loop alone draws which positions to unmask.
    origin = strategy == SEMI_AUTOREGRESSIVE and family.name == "dream"
    return (*everywhere, "origin") if origin else everywhere


def default_policy(strategy: str, family: Family, edits: bool = False) -> str:
    """What `auto` becomes: the authors' own rule in their own loop, else threshold.

    `edits` is whether the checkpoint was trained to replace tokens.
    """
    if edits:
        return JOINT
    if strategy != SEMI_AUTOREGRESSIVE:
        return "threshold"
    return "entropy" if family.name == "dream" else "low_confidence"


def options_read(strategy: str, policy: str, family: Family) -> set[str]:
    """Numbers and switches that change the result of a request."""
    read = {"policy", "block_length"}
    if strategy == D2F:
        thresholds = {"threshold", "block_add_threshold", "decoded_token_threshold"}
        return read | thresholds | {"max_active_blocks"}
    by_schedule = policy in SCHEDULED or policy in ("origin", "sequential")
    if policy in ("threshold", "factor"):
        read.add(policy)
    if by_schedule:
        read |= {"steps"}
        if family.name == "dream":
            read.add("eps")
    if family.absolute_grid and policy == "threshold":
        read.add("steps")  # how many positions a step unmasks at least
    if strategy == BLOCK_DIFFUSION:
        return read | _options_of_blocks(policy, family)
    read.add("steps")  # also the most steps that a threshold may take
    if family.name == "dream":
        read |= {"top_p", "top_k"}
        if policy in ("low_confidence", "entropy", "topk_margin"):
            read.add("alg_temp")
        return read
    read |= {"logits_eos_inf", "confidence_eos_eot_inf"}
    return read | {"cfg_scale"} if strategy == SEMI_AUTOREGRESSIVE else read


def _options_of_blocks(policy: str, family: Family) -> set[str]:
    """What block diffusion reads besides: several blocks at once, edits, sub-blocks."""
    read = {"sub_block_length", "use_block_cache"} if family.sub_block_length else set()
    if policy == JOINT:
        read |= {"threshold", "editing_threshold", "max_post_steps", "num_to_transfer"}
    if policy in ("threshold", JOINT):
        # Schedules count the steps of one block.
        read |= {"max_active_blocks", *OF_SEVERAL_BLOCKS}
    return read


def options_of(strategy: str, family: Family) -> set[str]:
    """Everything that some policy of a strategy reads."""
    sets = (options_read(strategy, policy, family) for policy in policies_of(strategy, family))
    return set().union(*sets)
