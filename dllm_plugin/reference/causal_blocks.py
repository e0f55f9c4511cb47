"""Decode Nemotron-Labs-Diffusion as its authors do: `generate` and `linear_spec_generate`.

Blocks are denoised bidirectionally after a causal context. A causal forward stores them,
and predicts the first token of the next block. The prompt's forward is not recorded.
"""

from typing import Protocol, cast

from torch import Tensor

from dllm_plugin.reference.full_attention import choose_of_left
from dllm_plugin.reference.proposing import Proposals, best_first, propose
from dllm_plugin.reference.text import Model, Slots, Text


class CausalModel(Model, Protocol):
    """Declare the causal forwards of a model."""

    def rows(self, tokens: list[int], block: list[int]) -> Tensor:
        """Compute logits ``[N, V]``; the query at i sees the key at j if block[i] >= block[j]."""

    def stored(self, tokens: list[int]) -> Slots:
        """Return the slots that a causal forward fills."""


def decode_causal_blocks(text: Text) -> None:
    """Denoise block after block until the answer is known."""
    _write_next(text)
    denoised = 0
    for start, end in zip(text.starts, text.starts[1:], strict=False):
        _write_end_of_thinking(text, start, end)
        text.append_masks(end)
        left = text.masked(start, end)
        size, step = len(left), 0
        while left:
            found = _proposals(text, start, left, denoised)
            for p in choose_of_left(text, left, size, step, found):
                text.write(p, found[p])
            text.end_forward(start, end, end, found)
            if text.final() is not None:
                return
            left = text.masked(start, end)
            step, denoised = step + 1, denoised + 1
        _write_next(text)
        text.end_forward(start, end, end, {})
        if text.final() is not None:
            return


def decode_self_speculation(text: Text) -> None:
    """Draft a block, and keep its tokens up to the first one that a causal forward refuses.

    Random numbers depend on positions only: text and drafts have the same.
    """
    _write_next(text)
    while True:
        start = len(text.tokens) - 1
        end = min(start + text.block_length, text.max_model_len)
        text.append_masks(end)
        while left := text.masked(start, end):
            found = _proposals(text, start, left, 0)
            for p in _sure_or_best(text, left, found):
                text.write(p, found[p])
            text.end_forward(start, end, end, found)
            if text.final(start + 1) is not None:
                return
        drafts = text.tokens[start + 1 :]
        rows = _causal_proposals(text, start)
        kept = 0
        while kept < len(drafts) and drafts[kept] == rows[start + 1 + kept].token:
            kept += 1
        del text.tokens[start + 1 :]
        for p in range(start + 1, start + 2 + kept):
            text.tokens.append(text.model.mask_id)
            text.write(p, rows[p])
        text.end_forward(start, end, end, {})
        if text.final() is not None:
            return


def _write_next(text: Text) -> None:
    """Append the token that the last row of a causal forward predicts."""
    position = len(text.tokens)
    found = _causal_proposals(text, position - 1)
    text.append_masks(position + 1)
    text.write(position, found[position])


def _write_end_of_thinking(text: Text, start: int, end: int) -> None:
    """Write the token that ends thinking, if the block passes the budget without it."""
    budget, token = text.rules.max_thinking_tokens, text.rules.end_think_token_id
    if budget is None or token is None:
        return
    place = len(text.prompt) + budget
    if end <= place or token in text.tokens[len(text.prompt) : start]:
        return
    place = max(place, start)
    text.append_masks(place + 1)
    text.tokens[place] = text.written[place] = token


def _proposals(text: Text, start: int, left: list[int], step: int) -> Proposals:
    """Propose tokens for the masked positions of a block."""
    slots = cast(CausalModel, text.model).stored(text.tokens[:start])
    drafter = text.drafter or text.model
    logits = drafter.rows_at(start, text.tokens[start:], slots)
    return propose(text, logits[[p - start for p in left]], left, step)


def _causal_proposals(text: Text, start: int) -> Proposals:
    """Propose a token after every position from `start` on, by a causal forward."""
    size = len(text.tokens)
    model = cast(CausalModel, text.model)
    logits = model.rows(text.tokens, list(range(size)))
    return propose(text, logits[start:], list(range(start + 1, size + 1)), 0)


def _sure_or_best(text: Text, left: list[int], found: Proposals) -> list[int]:
    """Return the positions that reach the threshold; the best one if none does."""
    limit = text.rules.threshold
    text.close_choice(*(found[p].confidence - limit for p in left))
    sure = [p for p in left if found[p].confidence >= limit]
    return sure or best_first(left, found)[:1]
