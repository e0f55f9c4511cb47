"""Decode Nemotron-Labs-Diffusion, I-DLM and WeDLM as their authors do.

Blocks are denoised bidirectionally after a causal context. A causal forward stores them,
and predicts the first token of the next block. The prompt's forward is not recorded.
"""

from functools import partial
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor

from .blocks import denoise_block
from .proposing import Proposals, best_first, propose
from .text import Model, Slots, Text


class CausalModel(Model, Protocol):
    """Declare the causal forwards of a model."""

    def rows(self, tokens: list[int], block: list[int]) -> Tensor:
        """Compute logits ``[N, V]``; the query at i sees the key at j if block[i] >= block[j]."""

    def stored(self, tokens: list[int]) -> Slots:
        """Return the slots that a causal forward fills."""


def decode_causal_blocks(text: Text) -> None:
    """Denoise block after block until the answer is known."""
    _write_first(text)
    for start, end in pairwise(text.starts):
        _write_end_of_thinking(text, start, end)
        if denoise_block(text, start, end, partial(_proposals, text, start)):
            return
        text.end_forward(start, end, end, {}, _write_next(text))
        if text.final() is not None:
            return


def decode_self_speculation(text: Text) -> None:
    """Draft a block, and keep its tokens up to the first token that a causal forward refuses.

    Random numbers depend on positions only: text and drafts have the same.
    """
    _write_first(text)
    while True:
        start = len(text.tokens) - 1
        end = min(start + text.block_length, text.max_model_len)
        text.append_masks(end)
        while left := text.masked(start, end):
            found = _proposals(text, start, left, 0)
            text.write_all(_sure_or_best(text, left, found), found)
            watch, text.watch = text.watch, None  # drafts are not decided yet
            text.end_forward(start, end, end, found)
            text.watch = watch
            if text.final(start + 1) is not None:
                return
        drafts = text.tokens[start + 1 :]
        rows = _causal_proposals(text, start)
        kept = 0
        for place, draft in enumerate(drafts, start + 1):
            if draft != rows[place].token:
                break
            kept += 1
        del text.tokens[start + 1 :]
        for p in range(start + 1, start + 2 + kept):
            text.tokens.append(text.model.mask_id)
            text.write(p, rows[p])
        text.end_forward(start, end, end, {}, rows)
        if text.final() is not None:
            return


def _write_next(text: Text) -> Proposals:
    """Append the token that the last row of a causal forward predicts."""
    position = len(text.tokens)
    found = _causal_proposals(text, position - 1)
    text.append_masks(position + 1)
    text.write(position, found[position])
    return found


def _write_first(text: Text) -> None:
    """Append the token that the prompt's forward predicts; the next forward records it, too."""
    found = _write_next(text)
    written = text.written
    text.show(found)
    text.written = written


def _write_end_of_thinking(text: Text, start: int, end: int) -> None:
    """Write the token that ends thinking, if the block passes the budget without it."""
    budget = text.rules.max_thinking_tokens
    token = text.rules.end_think_token_id
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
    """Return the positions that reach the threshold; the best position if none does."""
    limit = text.rules.threshold
    text.close_choice(*(found[p].confidence - limit for p in left))
    if sure := [p for p in left if found[p].confidence >= limit]:
        return sure
    best, *others = best_first(left, found)
    for p in others[:1]:
        text.close_choice(found[best].confidence - found[p].confidence)
    return [best]


def decode_introspective(text: Text) -> None:
    """Decode as the authors' engine at temperature 0, whose text is that of causal decoding.

    Rows are the pending token, the drafts after it if there are any, and masks. The first
    token of the text is the proposal of the prompt's last row.
    """
    first = len(text.prompt)
    _write_first(text)
    start, drafts = first, list[int]()
    while True:
        found = forward(text, start, drafts)
        accepted = 0
        for place, draft in enumerate(drafts, start + 1):
            if found[place].token != draft:
                break
            accepted += 1
        for place in range(start + 1, start + accepted + 2):
            text.append_masks(place + 1)
            text.write(place, found[place])
        stop = start + len(found)
        text.end_forward(start, stop, stop, found)
        if text.final() is not None:
            return
        start += accepted + 1
        all_accepted = accepted == len(drafts)
        last = start + text.block_length if all_accepted else start
        drafts = [found[place].token for place in range(start + 1, last)]


def forward(text: Text, start: int, drafts: list[int]) -> Proposals:
    """Return the proposals for the positions after `start`, of all rows from there on."""
    width = 2 * text.block_length - 1
    masks = [text.model.mask_id] * (width - 1 - len(drafts))
    tokens = text.tokens[: start + 1] + drafts + masks
    # One more, for the row of the last position.
    blocks = list(range(len(tokens) + 1))
    logits = text.model.predictions([*tokens, text.model.mask_id], blocks)
    places = list(range(start + 1, len(tokens) + 1))
    return propose(text, logits[places], places, 0)


def decode_window(text: Text) -> None:
    """Fill the surest masks of a window until the answer is known.

    The leading decided tokens are committed by the forward after the one that filled
    them, and the window grows by as many masks.
    """
    rules, base, step = text.rules, len(text.prompt), 0
    text.append_masks(base + rules.window)
    while True:
        masks = text.masked(base, len(text.tokens))
        filled = (masks[0] if masks else len(text.tokens)) - base
        text.append_masks(len(text.tokens) + filled)
        stop = len(text.tokens)
        masks = text.masked(base, stop)
        rows = row_order(base, stop, masks)
        logits = text.model.predictions(text.tokens, rows)
        found = propose(text, logits[masks], masks, step)
        is_final = text.final(base + filled) is not None
        if not is_final:
            text.write_all(choose(text, logits[masks], masks), found)
        text.end_forward(base, stop, stop, found)
        if is_final:
            del text.tokens[base + filled :]
            return
        base, step = base + filled, step + 1


def row_order(base: int, stop: int, masks: list[int]) -> list[int]:
    """Return the row of each position: decided positions of the window stand before masks."""
    undecided = set(masks)
    decided = [p for p in range(base, stop) if p not in undecided]
    rows = list(range(stop))
    for row, position in enumerate(decided + masks, base):
        rows[position] = row
    return rows


def choose(text: Text, logits: Tensor, masks: list[int]) -> list[int]:
    """Return the masks whose entropy, and a penalty of distance, is below the threshold.

    If there are none: the surest mask.
    """
    rules = text.rules
    scores = logits.log_softmax(-1)
    distance = torch.tensor(masks, device=logits.device) - masks[0]
    entropies = -(scores.exp() * scores).sum(-1)
    entropies = entropies + rules.position_penalty * distance
    limit = rules.entropy_threshold
    text.close_choice(*(entropies - limit).tolist())
    sure = [p for p, is_sure in zip(masks, entropies < limit, strict=True) if is_sure]
    if sure:
        return sure
    best, *others = entropies.argsort(stable=True).tolist()
    for other in others[:1]:
        text.close_choice(float(entropies[other] - entropies[best]))
    return [masks[best]]
