"""A script as the model of the plain loops."""

import torch
from scripted_rows import MASK, VOCAB, Script

from dllm_plugin.reference.text import Slots


class ScriptedModel:
    """Rows of a script; only those that predict an undecided position are computed."""

    mask_id = MASK

    def __init__(self, script: Script, shift: bool) -> None:
        self.script, self.shift = script, shift

    def predictions(self, tokens: list[int], block: list[int]) -> torch.Tensor:
        logits = torch.zeros(len(tokens), VOCAB)
        for position, token in enumerate(tokens):
            if token == MASK:
                seen = block[position - self.shift]
                visible = [t for t, b in zip(tokens, block, strict=True) if b <= seen]
                row = self.script(visible, position)
                logits[position] = torch.from_numpy(row)
        return logits

    def rows_at(self, start: int, tokens: list[int], slots: Slots) -> torch.Tensor:
        raise AssertionError("no loop of blocks asks for this")
