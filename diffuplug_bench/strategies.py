"""Say what the benchmark needs to know of each strategy that it measures. Light imports only."""

from dataclasses import dataclass, replace

from dllm_plugin.decoding.families import (
    BLOCK_DIFFUSION,
    D2F,
    DUAL_CACHE,
    PREFIX_CACHE,
    SEMI_AUTOREGRESSIVE,
)


@dataclass(frozen=True)
class Measured:
    """Hold how one strategy is measured.

    canvas         lengths of a canvas by default
    longest_block  positions of a block at most; None: half a canvas, so that two share a step
    timed_blocks   blocks during which all requests are timed
    next_block     a step may compute the block behind the denoised one
    by_confidence  positions are accepted by confidence alone, with a D2F adapter; else by schedule
    full_attention forwards differ in size, which is counted in a second run
    refreshes      some forwards compute everything, others trust the keys before a block
    """

    canvas: tuple[int, ...]
    longest_block: int | None
    timed_blocks: int
    next_block: bool
    by_confidence: bool
    full_attention: bool = False
    refreshes: bool = True


FULL_ATTENTION = Measured(
    (256,), 32, 6, next_block=False, by_confidence=False, full_attention=True
)

MEASURED = {
    BLOCK_DIFFUSION: Measured((32,), None, 6, next_block=True, by_confidence=False),
    # Fewer blocks, because one takes as many steps as it has positions.
    D2F: Measured((128,), 32, 3, next_block=False, by_confidence=True),
    DUAL_CACHE: FULL_ATTENTION,
    PREFIX_CACHE: FULL_ATTENTION,
    SEMI_AUTOREGRESSIVE: replace(FULL_ATTENTION, refreshes=False),
}


def default_strategy(adapted: bool) -> str:
    """Return the strategy that is measured with an adapter, or without one."""
    return D2F if adapted else BLOCK_DIFFUSION
