"""List the plain loops: one for each strategy, all with one signature."""

from collections.abc import Callable
from typing import NamedTuple

from . import rules
from .blocks import decode_blocks, decode_exact_blocks, decode_sub_blocks
from .causal_blocks import (
    decode_causal_blocks,
    decode_introspective,
    decode_self_speculation,
    decode_window,
)
from .full_attention import decode_full_attention
from .structure import decode_structure
from .text import Result, Text
from .widths import decode_widths

RANKED = ("low_confidence", "entropy", "topk_margin", "random")


class Loop(NamedTuple):
    """Store the function of a loop, which decodes a text, and the policies it knows."""

    decode: Callable[[Text], None]
    policies: tuple[str, ...]


OF_LEFT = ("threshold", "factor", *RANKED)
GRID = (*OF_LEFT, "sequential")
FULL = Loop(decode_full_attention, (*OF_LEFT, "origin"))
LOOPS = {
    rules.D2F: Loop(decode_blocks, ("threshold", "entropy", "topk_margin")),
    rules.BLOCK_DIFFUSION: Loop(decode_blocks, (*GRID, rules.EDITING)),
    rules.SUB_BLOCKS: Loop(decode_sub_blocks, GRID),
    rules.EXACT_BLOCKS: Loop(decode_exact_blocks, OF_LEFT),
    rules.CAUSAL_BLOCKS: Loop(decode_causal_blocks, OF_LEFT),
    rules.SELF_SPECULATION: Loop(decode_self_speculation, ("threshold",)),
    rules.STRUCTURE: Loop(decode_structure, (rules.EDITING,)),
    rules.SEMI_AUTOREGRESSIVE: FULL,
    rules.PREFIX_CACHE: FULL,
    rules.DUAL_CACHE: FULL,
    rules.WIDTHS: Loop(decode_widths, ("threshold",)),
    rules.INTROSPECTIVE: Loop(decode_introspective, ("sequential",)),
    rules.CAUSAL_WINDOW: Loop(decode_window, ("entropy",)),
}


def decode(text: Text) -> Result:
    """Decode a text by the loop of its rules.

    Raises ValueError for a policy that the loop does not know.
    """
    loop = LOOPS[text.rules.strategy]
    policy = text.rules.policy
    if policy not in loop.policies:
        raise ValueError(
            f"the plain loop of {text.rules.strategy} does not know the policy "
            f"{policy!r}, only {', '.join(loop.policies)}"
        )
    loop.decode(text)
    return text.result()
