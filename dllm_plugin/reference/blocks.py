"""Decode by D2F or block diffusion: one or several blocks at once, on either grid.

Each forward computes the whole text again. D2F is arXiv 2508.09192; block diffusion
with the policy ``joint_threshold`` replaces decided tokens as LLaDA2.1 does. Fast-dLLM v2,
Stable-DiffCoder and A2D by blocks decode one block after the other.
"""

from collections.abc import Callable
from itertools import pairwise

from .full_attention import choose_of_left, count_by_factor
from .numbers import dream_quota, float32, step_with_rounded_quota
from .proposing import Proposals, best_first, propose
from .rules import D2F, EDITING, FAR, Rules
from .text import Text


def decode_blocks(text: Text) -> None:
    """Denoise the open blocks until the answer is known.

    Leading finished blocks are stored by the next forward, which then no longer
    computes them.
    """
    rules, edits = text.rules, text.rules.policy == EDITING
    first = opened = step = denoised = checks = 0
    full: set[int] = set()
    saw_stop, settled = False, 0 if edits else FAR
    while text.final(settled) is None:
        if opens_block(text, first, opened, saw_stop):
            text.append_masks(text.starts[opened + 1])
            opened += 1
        active = [i for i in range(first, opened) if text.masked_in(i)]
        full |= activated(text, first, opened)
        num_stored = (active[0] if active else opened) - first
        if edits:
            num_stored = min(num_stored, 1)
        rows = rows_to_decide(text, first, active)
        logits = text.predict()
        found = propose(text, logits[rows], rows, denoised)
        replaced: list[int] = []
        if edits and (num_stored == 0 or checks < rules.max_post_steps):
            low = max(text.starts[first], len(text.prompt))
            replaced = tokens_to_replace(text, found, low, text.starts[first + 1])
        written = []
        for i in active:
            quota = int(i in full)
            if i == active[0]:
                quota = first_quota(text, i, step)
            written += choose(text, candidates(text, i), found, quota)
        checked = num_stored > 0 and bool(replaced)
        if checked:
            # The block stays, and what was decided after it was decided too early.
            num_stored, checks = 0, checks + 1
            written = [] if most_active(rules) == 1 else written
        if active:
            is_done = set(candidates(text, active[0])) <= set(written)
            step = 0 if is_done else step + 1
        denoised += bool(active) or checked
        text.write_all(replaced + written, found)
        start, end = text.starts[first], text.starts[opened]
        text.end_forward(start, end, end, found)
        saw_stop = has_stop(text, start, end) or (saw_stop and not edits)
        if edits:
            is_last = checked and checks == rules.max_post_steps
            settled = text.starts[first + (num_stored or int(is_last))]
        first += num_stored
        checks = checks if checked else 0


def decode_sub_blocks(text: Text) -> None:
    """Denoise block after block in sub-blocks until the answer is known.

    A finished block is stored by a forward of its own, whose last row predicts the
    first token of the next block, as the prompt's does if it ends with a block. Such a
    token is sent with the next forward, and is not an answer before. The prompt's
    forward is not recorded.
    """
    if text.starts[0] == len(text.prompt):
        _predict_first(text)
    for index, (start, end) in enumerate(pairwise(text.starts)):
        text.append_masks(end)
        step = 0
        while rows := candidates(text, index):
            found = propose(text, text.predict()[rows], rows, step)
            written = choose(text, rows, found, first_quota(text, index, step))
            text.write_all(written, found)
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


def decode_exact_blocks(text: Text) -> None:
    """Denoise block after block until the answer is known; the last block ends with it.

    The forward that stores a block is also the first to denoise the next block.
    """

    def proposals(left: list[int], step: int) -> Proposals:
        return propose(text, text.predict()[left], left, step)

    for start, end in pairwise(text.starts):
        if denoise_block(text, start, end, proposals):
            return


def denoise_block(
    text: Text,
    start: int,
    end: int,
    proposals: Callable[[list[int], int], Proposals],
) -> bool:
    """Denoise a block until it or the answer is known; return whether the answer is.

    Args:
        proposals: proposes for masked positions, by the number of the forward.
    """
    text.append_masks(end)
    left = text.masked(start, end)
    size, step = len(left), 0
    while left:
        if text.rules.rounded:
            step = step_with_rounded_quota(len(left), text.steps, step)
        denoised = sum(bool(forward.rows) for forward in text.forwards)
        found = proposals(left, denoised)
        text.write_all(choose_of_left(text, left, size, step, found), found)
        text.end_forward(start, end, end, found)
        if text.final() is not None:
            return True
        left, step = text.masked(start, end), step + 1
    return False


def has_stop(text: Text, start: int, end: int) -> bool:
    """Return whether the answer has a stop token in [start, end)."""
    tokens = text.tokens[max(start, len(text.prompt)) : end]
    return any(token in text.stop for token in tokens)


def most_active(rules: Rules) -> int:
    """Return how many blocks may be denoised at once."""
    if rules.max_active_blocks is not None:
        return rules.max_active_blocks
    return FAR if rules.strategy == D2F else 1


def opens_block(text: Text, first: int, opened: int, saw_stop: bool) -> bool:
    """Return whether a forward computes another block than the one before it."""
    rules, most = text.rules, most_active(text.rules)
    if saw_stop or opened == text.num_blocks:
        return False
    if text.starts[opened + 1] - text.starts[first] > rules.canvas_length:
        return False
    busy = list(range(first, opened))
    if rules.strategy != D2F:
        busy = [i for i in busy if text.masked_in(i)]
    if len(busy) >= most:
        return False
    if opened == first:
        return True
    enough = rules.block_add_threshold
    if most == 1 and rules.strategy != D2F:
        enough = 1.0
    return decided_share(text, opened - 1) >= float32(enough)


def activated(text: Text, first: int, opened: int) -> set[int]:
    """Return the blocks that must decide a position in every forward."""
    found = {first}
    for i in range(first, opened):
        if decided_share(text, i) >= float32(text.rules.decoded_token_threshold):
            found.add(i + 1)
    return found


def decided_share(text: Text, index: int) -> float:
    """Return the share of a block that is decided, in float32 as the engine compares."""
    size = text.starts[index + 1] - text.starts[index]
    return float32((size - len(text.masked_in(index))) / size)


def rows_to_decide(text: Text, first: int, active: list[int]) -> list[int]:
    """Return the positions that a forward may decide, or replace in the first block."""
    rows: set[int] = set()
    if text.rules.policy == EDITING:
        low = max(text.starts[first], len(text.prompt))
        rows.update(range(low, text.starts[first + 1]))
    for i in active:
        rows.update(candidates(text, i))
    return sorted(rows)


def candidates(text: Text, index: int) -> list[int]:
    """Return the masked positions of a block's first sub-block that has any."""
    masked, low = text.masked_in(index), text.starts[index]
    size = text.rules.sub_block_length or text.block_length
    first = (masked[0] - low) // size if masked else 0
    return [p for p in masked if (p - low) // size == first]


def first_quota(text: Text, index: int, step: int) -> int:
    """Return how many positions the first unfinished block decides at least."""
    rules, size = text.rules, text.block_length
    if rules.policy == EDITING:
        return rules.num_to_transfer
    if rules.strategy == D2F or (rules.policy == "threshold" and not rules.on_grid):
        return 1
    if step >= text.steps - 1:
        return size
    if not rules.on_grid:
        if text.model.shift:
            left = len(text.masked_in(index))
            return dream_quota(left, text.steps, step, rules.eps)
        size = text.starts[index + 1] - text.starts[index]
    return size // text.steps + (step < size % text.steps)


def choose(text: Text, masked: list[int], found: Proposals, quota: int) -> list[int]:
    """Return the positions that take their proposals."""
    rules, order = text.rules, best_first(masked, found)
    if rules.strategy == D2F or rules.policy in ("threshold", EDITING):
        return sure_or_best(text, order, found, quota)
    scores = [found[p].score for p in order]
    if rules.policy == "factor":
        quota = count_by_factor(text, scores)
    elif 0 < quota < len(order):
        text.close_choice(scores[quota - 1] - scores[quota])
    return order[:quota]


def sure_or_best(
    text: Text, order: list[int], found: Proposals, quota: int
) -> list[int]:
    """Return the positions above the threshold, or the best positions if those are too few."""
    limit = float32(text.rules.threshold)
    text.close_choice(*(found[p].confidence - limit for p in order))
    sure = [p for p in order if found[p].confidence > limit]
    if len(sure) >= quota:
        return sure
    if quota < len(order):
        last = found[order[quota - 1]]
        next_one = found[order[quota]]
        text.close_choice(last.score - next_one.score)
    return order[:quota]


def tokens_to_replace(text: Text, found: Proposals, low: int, high: int) -> list[int]:
    """Return decided positions of [low, high) for which the model is sure of another token."""
    limit = float32(text.rules.editing_threshold)
    positions = []
    for p in range(low, high):
        proposal, token = found[p], text.tokens[p]
        if token == text.model.mask_id:
            continue
        if proposal.token != token:
            text.close_choice(proposal.confidence - limit)
            if proposal.confidence > limit:
                positions.append(p)
        elif proposal.confidence > limit - 1e-3:
            text.close_call(proposal.gap)
    return positions
