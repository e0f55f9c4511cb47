"""Decode LLaDA2.2: a block may replace, delete and insert tokens until it settles."""

from dataclasses import dataclass, field
from itertools import pairwise

from .blocks import sure_or_best, tokens_to_replace
from .proposing import Proposals, best_first, propose
from .text import Text

LEAST_ROUNDS = 1000  # in which every block is decided at the latest
ATTEMPTS = 5  # to leave a row that was seen before


@dataclass
class Block:
    """Store the block that is decoded.

    The positions [low, high) are those after the prompt. `inserted` are masks that
    edits inserted, `seen` the rows before deletions and insertions.
    """

    text: Text
    low: int
    high: int
    step: int = 0
    post: int = 0
    inserted: set[int] = field(default_factory=set)
    seen: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def row(self) -> list[int]:
        """Return the tokens after the prompt."""
        return self.text.tokens[self.low : self.high]

    def waiting(self) -> list[int]:
        """Return the masks that were there from the start."""
        masked = self.text.masked(self.low, self.high)
        return [p for p in masked if p not in self.inserted]

    def is_over(self) -> bool:
        """Return whether the block has had its rounds without original masks."""
        if self.text.masked(self.low, self.high):
            return False
        return self.post + 1 > self.text.rules.max_post_steps


def decode_structure(text: Text) -> None:
    """Decode block after block until the answer is known.

    The forward that stores a block which changed in its last round is also the first
    one of the next block.
    """
    denoised = 0
    for start, end in pairwise(text.starts):
        text.append_masks(end)
        block = Block(text, max(start, len(text.prompt)), end)
        while True:
            found = _propose(text, block, denoised)
            changed, is_final = _round(text, block, found)
            text.end_forward(start, end, end, found)
            denoised += 1
            if is_final or not changed or block.is_over():
                break
        if text.final(end) is not None:
            return


def _propose(text: Text, block: Block, step: int) -> Proposals:
    """Propose for all positions; only masks are sampled, by penalised logits."""
    rows = list(range(block.low, block.high))
    masked = text.masked(block.low, block.high)
    logits = text.predict()
    found = propose(text, logits[rows], rows, step, edits=True)
    return found | propose(text, logits[masked], masked, step)


def _round(text: Text, block: Block, found: Proposals) -> tuple[bool, bool]:
    """Take a round of decisions; return whether it changed tokens, and was the last."""
    old = block.row
    waiting = block.waiting()
    masked = text.masked(block.low, block.high)
    block.post = 0 if waiting else block.post + 1
    fills = _fills(text, block, masked, found)
    is_final = _is_final(text, block, waiting, fills)
    edits = tokens_to_replace(text, found, block.low, block.high)
    new = dict(zip(range(block.low, block.high), old, strict=True))
    for p in (masked if is_final else fills) + edits:
        new[p] = found[p].token
        if is_final and new[p] in text.rules.structure:
            new[p] = _best_other(text, found, p, text.rules.structure)
        text.raw[p] = found[p].logits
        text.close_call(found[p].gap)
    if not is_final:
        _leave_seen(text, block, found, old, new)
    row, block.inserted = _restructured(text, block, old, list(new.values()))
    block.step += 1
    changed = row != old or bool(masked)
    for p, token in enumerate(row, block.low):
        if token != text.tokens[p]:
            text.tokens[p] = text.written[p] = token
    return changed, is_final


def _fills(text: Text, block: Block, masked: list[int], found: Proposals) -> list[int]:
    """Return the masks that take their proposals."""
    step = block.step
    if step >= text.steps:
        return masked
    size = block.high - block.low
    need = size // text.steps + (step < size % text.steps)
    need += len(set(masked) & block.inserted)
    return sure_or_best(text, best_first(masked, found), found, need)


def _is_final(text: Text, block: Block, waiting: list[int], fills: list[int]) -> bool:
    """Return whether the round fills all masks, and deletes and inserts nothing."""
    if block.step >= LEAST_ROUNDS - 1:
        return True
    if text.rules.max_post_steps > 0:
        return block.post >= text.rules.max_post_steps
    return bool(waiting) and set(waiting) <= set(fills)


def _best_other(
    text: Text, found: Proposals, position: int, banned: tuple[int, ...]
) -> int:
    """Return the best token of a position that is none of `banned`."""
    logits = found[position].logits.clone()
    logits[[text.model.mask_id, *banned]] = float("-inf")
    best = logits.topk(2).values
    text.close_call(float(best[0] - best[1]))
    return int(logits.argmax())


def _leave_seen(
    text: Text, block: Block, found: Proposals, old: list[int], new: dict[int, int]
) -> None:
    """Change the least certain of the new tokens while the row was seen before."""
    for _ in range(ATTEMPTS):
        changed = [p for p in new if new[p] != old[p - block.low]]
        if not changed or tuple(new.values()) not in block.seen:
            break
        p = min(changed, key=lambda p: (found[p].confidence, p))
        new[p] = _best_other(text, found, p, (new[p],))
    block.seen.add(tuple(new.values()))


def _restructured(
    text: Text, block: Block, old: list[int], row: list[int]
) -> tuple[list[int], set[int]]:
    """Return the row after deletions and insertions, and its inserted masks."""
    mask = text.model.mask_id
    delete, split = text.rules.structure
    tokens: list[int] = []
    inserted: set[int] = set()

    def append(token: int, is_inserted: bool) -> None:
        if is_inserted:
            inserted.add(block.low + len(tokens))
        tokens.append(token)

    for i, token in enumerate(row):
        was_inserted = block.low + i in block.inserted
        if token == split:
            append(mask, True)
            append(old[i], was_inserted)
        elif token != delete:
            append(token, was_inserted)
    while len(tokens) < len(row):
        append(mask, True)
    kept = tokens[: len(row)]
    masks = {p for p in inserted if p < block.high and kept[p - block.low] == mask}
    return kept, masks
