"""The narrowest widths of the plain loop against loops that know nothing of widths."""

from pathlib import Path

import torch

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

PROMPT, COUNT = [30 + 7 * i % 90 for i in range(25)], 12


def narrowest(model: PlainModel, *widths: int) -> Text:
    rules = Rules("widths", block_length=32, canvas_length=32, widths=widths)
    text = Text(model, PROMPT, COUNT, rules)
    decode(text)
    return text


def test_plain_rows_decode_blocks_of_one(checkpoints: Path) -> None:
    """Each token is computed as a mask and then decided, in the forward of the next."""
    model = PlainModel.load(checkpoints / "tiny-llada")
    text = narrowest(model, 1, 2)
    blocks = Rules("block_diffusion", block_length=1)
    assert text.answer() == decode(Text(model, PROMPT, COUNT, blocks)).tokens
    assert (len(text.forwards), text.num_positions()) == (COUNT, 2 * COUNT - 1)


@torch.no_grad()
def test_shifted_rows_decode_as_a_causal_model(checkpoints: Path) -> None:
    """Behind a prompt that sees itself: the last token's row predicts the next, no mask is fed."""
    model = PlainModel.load(checkpoints / "tiny-dream")
    text, tokens = narrowest(model, 1), list(PROMPT)
    for i in range(COUNT):
        # Nothing sees the mask, which only stands where the prediction is asked for.
        visible = [0] * len(PROMPT) + list(range(1, i + 2))
        row = model.predictions([*tokens, model.mask_id], visible)[-1]
        row[model.mask_id] = float("-inf")
        tokens.append(int(row.argmax()))
    assert text.answer() == tokens[len(PROMPT) :]
    assert (len(text.forwards), text.num_positions()) == (COUNT, COUNT)
