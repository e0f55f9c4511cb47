"""Decode Fast-dLLM v2 as its authors do: block after block, in sub-blocks."""

from dllm_plugin.reference.blocks import candidates, choose, first_quota
from dllm_plugin.reference.proposing import propose
from dllm_plugin.reference.text import Text


def decode_sub_blocks(text: Text) -> None:
    """Denoise block after block until the answer is known.

    A finished block is stored by a forward of its own, whose last row predicts the
    first token of the next block, as the prompt's does if it ends with a block. Such a
    token is sent with the next forward, and is not an answer before. The prompt's
    forward is not recorded.
    """
    if text.starts[0] == len(text.prompt):
        _predict_first(text)
    for index in range(text.num_blocks):
        start, end = text.starts[index], text.starts[index + 1]
        text.append_masks(end)
        step = 0
        while rows := candidates(text, index):
            found = propose(text, text.predict()[rows], rows, step)
            written = choose(text, rows, found, first_quota(text, index, step))
            for p in written:
                text.write(p, found[p])
            text.end_forward(start, end, end, found)
            step = 0 if len(written) == len(rows) else step + 1
            if text.final() is not None:
                return
        text.end_forward(start, end, end, {})
        if text.final() is not None:
            return
        _predict_first(text)


def _predict_first(text: Text) -> None:
    """Append the token that the last row predicts."""
    position = len(text.tokens)
    text.append_masks(position + 1)  # a row of its own for `predictions`
    found = propose(text, text.predict()[-1:], [position], 0)
    text.write(position, found[position])
    text.show(found)
