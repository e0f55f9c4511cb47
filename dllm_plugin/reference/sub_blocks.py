"""Decode Fast-dLLM v2 as its authors do: a block after the other, in sub-blocks."""

from dllm_plugin.reference.grid_blocks import (
    GridText,
    Rules,
    candidates,
    picked,
    quota_of,
)


def sub_blocks(text: GridText, rules: Rules) -> GridText:
    """Decode until the answer is known; `text.passes` counts all but the prompt's.

    A finished block is stored by a pass of its own, whose last row predicts the first token of the
    next block. So does the prompt's where it ends with a block. Such a token is sent with the pass
    behind it, and is not an answer before.
    """
    if text.lows[0] == len(text.prompt):
        _predict_first(text)
    for index in range(text.num_blocks):
        _open(text, index)
        step = 0
        while masked := candidates_of_any(text, index, rules):
            logits, probs = text.forward()
            quota = quota_of(rules, text.block_length, step)
            written = picked(text, masked, probs, quota, rules, step)
            text.write(written, logits, probs)
            text.tell(logits, masked)
            text.passes += 1
            step = step + 1 if set(masked) - set(written) else 0
            if text.final() is not None:
                return text
        text.passes += 1
        if text.final() is not None:
            return text
        _predict_first(text)
    return text


def candidates_of_any(text: GridText, index: int, rules: Rules) -> list[int]:
    """Return the masked positions of a block's first sub-block that has any, or none."""
    return candidates(text, index, rules) if text.masked(index) else []


def _open(text: GridText, index: int) -> None:
    """Append the masks of a block behind what is known of it."""
    text.tokens += [text.model.mask_id] * (text.bounds[index + 1] - len(text.tokens))


def _predict_first(text: GridText) -> None:
    """Append the token that the last row predicts."""
    position = len(text.tokens)
    text.tokens.append(text.model.mask_id)  # a row of its own for `predictions`
    logits, probs = text.forward()
    text.write([position], logits, probs)
    text.tell(logits, [position])
