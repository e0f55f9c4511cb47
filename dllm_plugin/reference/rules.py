"""Store the options of a plain loop under the names of the engine's options."""

from dataclasses import dataclass

D2F = "d2f"
BLOCK_DIFFUSION = "block_diffusion"
SUB_BLOCKS = "sub_blocks"
EXACT_BLOCKS, CAUSAL_BLOCKS = "exact_blocks", "causal_blocks"
SELF_SPECULATION = "self_speculation"
STRUCTURE = "structure"
SEMI_AUTOREGRESSIVE = "semi_autoregressive"
PREFIX_CACHE, DUAL_CACHE = "prefix_cache", "dual_cache"
CACHED = (PREFIX_CACHE, DUAL_CACHE)
FULL_ATTENTION = (SEMI_AUTOREGRESSIVE, *CACHED)
WIDTHS = "widths"
INTROSPECTIVE = "introspective"
CAUSAL_WINDOW = "causal_window"
EDITING = "joint_threshold"  # the policy that replaces decided tokens
FAR = 10**9  # more positions than any text has


@dataclass(frozen=True)
class Rules:
    """Store the options of one text; a request gives each as ``dllm_NAME``.

    The penalties are vLLM's own parameters of a request, as are `temperature` and `seed`.

    Not an option of a request: `strategy`, a key of `LOOPS`; `on_grid`, whether blocks
    start at multiples of their length instead of at the end of the prompt; `exact_end`,
    whether the last block ends with the answer; `rounded`, whether quotas are A2D's;
    `linear`, whether they are RND1's, which counts the positions that stay masked;
    `splits_prompt`, whether blocks divide the prompt too, from its end backwards; `widths`,
    the canvas positions that each forward computes, the last one for all further
    forwards; `eos` and `eot`, the tokens that `logits_eos_inf` and
    `confidence_eos_eot_inf` ban; `structure`, the two that delete a token and insert a
    mask.

    None means: `block_length` the whole canvas, `steps` as many as a block has
    positions, `max_active_blocks` one in block diffusion and any number in D2F,
    `sub_block_length` no sub-blocks, `refresh_before` from the start of the answer,
    `suffix_window` the whole canvas.
    """

    strategy: str
    policy: str = "threshold"
    block_length: int | None = None
    canvas_length: int = FAR
    on_grid: bool = False
    exact_end: bool = False
    rounded: bool = False
    splits_prompt: bool = False
    threshold: float = 0.9
    steps: int | None = None
    factor: float = 1.0
    eps: float = 1e-3
    temperature: float = 0.0
    entropy_temperature: float = 1.0
    linear: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    alg_temp: float | None = None
    max_active_blocks: int | None = None
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95
    sub_block_length: int | None = None
    editing_threshold: float = 0.5
    max_post_steps: int = 16
    num_to_transfer: int = 1
    cfg_scale: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    eos: int = -1
    eot: int = -1
    structure: tuple[int, ...] = ()
    full_refresh_every: int = 1
    refresh_before: int | None = None
    suffix_window: int | None = None
    max_thinking_tokens: int | None = None
    end_think_token_id: int | None = None
    widths: tuple[int, ...] = ()
    window: int = 16
    entropy_threshold: float = 0.4
    position_penalty: float = 0.02
