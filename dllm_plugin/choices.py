"""Which policies a strategy knows, and which options it reads with each. Plain data and sets."""

from dllm_plugin.models import Family

D2F = "d2f"
BLOCK_DIFFUSION = "block_diffusion"
SEMI_AUTOREGRESSIVE = "semi_autoregressive"
PREFIX_CACHE = "prefix_cache"
DUAL_CACHE = "dual_cache"
# Every position sees every other: KV is recomputed, at the latest when a block is done.
FULL_ATTENTION = (SEMI_AUTOREGRESSIVE, PREFIX_CACHE, DUAL_CACHE)

SCHEDULED = ("low_confidence", "entropy", "topk_margin", "random")
STRATEGIES = ("auto", D2F, BLOCK_DIFFUSION, *FULL_ATTENTION)
POLICIES = ("auto", "threshold", "factor", *SCHEDULED, "origin", "sequential")

# Options that do nothing at these values, so that they may stand beside any strategy.
OFF = {
    "alg_temp": (None, 0),
    "cfg_scale": (0,),
    "logits_eos_inf": (False,),
    "confidence_eos_eot_inf": (False,),
    "top_p": (1,),
    "top_k": (0,),
}


def strategies_of(family: Family) -> tuple[str, ...]:
    """Strategies that decode a family as it was trained, or approximately so."""
    return (BLOCK_DIFFUSION,) if family.absolute_grid else STRATEGIES[1:]


def policies_of(strategy: str, family: Family) -> tuple[str, ...]:
    """Policies that mean something under a strategy for a family of models."""
    if strategy == D2F:
        return ("threshold", "entropy", "topk_margin")
    everywhere = ("threshold", "factor", *SCHEDULED)
    if family.absolute_grid:
        return (*everywhere, "sequential")
    # Dream's own loop alone draws which positions to unmask.
    origin = strategy == SEMI_AUTOREGRESSIVE and family.name == "dream"
    return (*everywhere, "origin") if origin else everywhere


def default_policy(strategy: str, family: Family) -> str:
    """What `auto` becomes: the authors' own rule in their own loop, else threshold."""
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
        return read
    read.add("steps")  # also the most steps that a threshold may take
    if family.name == "dream":
        read |= {"top_p", "top_k"}
        if policy in ("low_confidence", "entropy", "topk_margin"):
            read.add("alg_temp")
        return read
    read |= {"logits_eos_inf", "confidence_eos_eot_inf"}
    return read | {"cfg_scale"} if strategy == SEMI_AUTOREGRESSIVE else read


def options_of(strategy: str, family: Family) -> set[str]:
    """Everything that some policy of a strategy reads."""
    sets = (options_read(strategy, policy, family) for policy in policies_of(strategy, family))
    return set().union(*sets)
