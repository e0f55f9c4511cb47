"""Decode Stable-DiffCoder, and A2D by blocks: one block after the other, by what is left."""

from dllm_plugin.reference.full_attention import choose_of_left
from dllm_plugin.reference.numbers import step_with_rounded_quota
from dllm_plugin.reference.proposing import propose
from dllm_plugin.reference.text import Text


def decode_exact_blocks(text: Text) -> None:
    """Denoise block after block until the answer is known; the last one ends with it.

    The forward that stores a block is also the first one that denoises the next block.
    """
    denoised = 0
    for start, end in zip(text.starts, text.starts[1:], strict=False):
        text.append_masks(end)
        left = text.masked(start, end)
        size, step = len(left), 0
        while left:
            if text.rules.rounded:
                step = step_with_rounded_quota(len(left), text.steps, step)
            found = propose(text, text.predict()[left], left, denoised)
            for p in choose_of_left(text, left, size, step, found):
                text.write(p, found[p])
            text.end_forward(start, end, end, found)
            if text.final() is not None:
                return
            left = text.masked(start, end)
            step, denoised = step + 1, denoised + 1
