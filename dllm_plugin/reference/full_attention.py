"""Decode under full attention, as LLaDA, Dream and Fast-dLLM do.

Keys and values lie in slots by position, as in the authors' code: each query writes its
own slot and then sees all slots of the canvas. A finished canvas is the prompt of the
next one.
"""

from torch import Tensor

from . import numbers
from .proposing import Proposals, best_first, propose, uniforms
from .rules import CACHED, DUAL_CACHE, PREFIX_CACHE
from .text import FILL, Slots, Text


def decode_full_attention(text: Text) -> None:
    """Decode canvas after canvas until the answer is known."""
    slots: Slots = {}
    while text.final() is None:
        canvas = len(text.tokens)
        for low, high in _open_canvas(text):
            _denoise_block(text, canvas, low, high, slots)
            if text.final() is not None:
                return


def _open_canvas(text: Text) -> list[tuple[int, int]]:
    """Append the masks of a canvas, or the template, and return its blocks."""
    start, size = len(text.tokens), text.block_length
    end = start + text.max_tokens
    if text.template is None:
        left = end - start - (start - len(text.prompt))
        blocks = min(-(-left // size), max(text.rules.canvas_length // size, 1))
        end = min(start + blocks * size, text.max_model_len)
        if text.rules.exact_end:
            end = min(end, start + left)
        text.append_masks(end)
    else:
        mask_id = text.model.mask_id
        text.tokens += [mask_id if t == FILL else t for t in text.template]
    return [(low, min(low + size, end)) for low in range(start, end, size)]


def _denoise_block(text: Text, canvas: int, low: int, high: int, slots: Slots) -> None:
    """Decode one block to its end or the end of the answer."""
    rules, size = text.rules, len(text.masked(low, high))
    end = len(text.tokens)
    if rules.suffix_window is not None:
        end = min(high + rules.suffix_window, end)
    first, last, step = _refresh_start(text, low, slots), end, 0
    windows = {PREFIX_CACHE: (low, end), DUAL_CACHE: (low, high)}
    while (left := text.masked(low, high)) and text.final() is None:
        rows = _forward(text, canvas, first, last, slots)
        logits = rows[[p - first - text.model.shift for p in left]]
        found = propose(text, logits, left, step)
        text.close_call(*(proposal.gap for proposal in found.values()))
        if rules.rounded:
            step = numbers.step_with_rounded_quota(len(left), text.steps, step)
        # Later steps compute no row that predicts the first position.
        is_shifted = text.model.shift and rules.strategy in CACHED
        if is_shifted and left[0] == low and step == 0:
            taken = [low]
        else:
            taken = choose_of_left(text, left, size, step, found)
        text.write_all(taken, found)
        text.end_forward(first, last, end, found)
        first, last = windows.get(rules.strategy, (0, end))
        step += 1


def _refresh_start(text: Text, low: int, slots: Slots) -> int:
    """Return the first position of the refresh with which a block begins."""
    decided = low - len(text.prompt)
    if decided in text.lost:
        slots.clear()
    if not slots:  # blocks that a template gives take no forward
        return 0
    if decided // text.block_length % text.rules.full_refresh_every == 0:
        return 0
    before = text.rules.refresh_before
    return len(text.prompt) if before is None else max(0, low - before)


def _forward(text: Text, canvas: int, first: int, last: int, slots: Slots) -> Tensor:
    """Compute logits of the queries [first, last), with guidance if asked for."""
    logits = text.model.rows_at(first, text.tokens[first:last], slots)
    scale = text.rules.cfg_scale
    if scale > 0:
        blank = [text.model.mask_id] * canvas + text.tokens[canvas:]
        without = text.model.rows_at(0, blank[:last], {})
        logits = without + (scale + 1) * (logits - without)
    return logits


def choose_of_left(
    text: Text, left: list[int], size: int, step: int, found: Proposals
) -> list[int]:
    """Return the masked positions that take their proposals, of a block with `size` masks."""
    rules, is_last = text.rules, step >= text.steps - 1
    if rules.policy == "origin":
        return left if is_last else _transfers(text, left, step)
    order = best_first(left, found)
    scores = [found[p].score for p in order]
    if rules.policy == "threshold":
        allowed = len(left)
        if text.model.shift and rules.strategy not in CACHED:
            allowed = _released(size, text.steps, step) - (size - len(left))
            is_last = False
        limit = numbers.float32(rules.threshold)
        text.close_choice(*(score - limit for score in scores[1:allowed]))
        sure = [score for score in scores if score >= limit]
        count = min(allowed, max(1, len(sure)))
    elif rules.policy == "factor":
        count = count_by_factor(text, scores)
    elif rules.linear:
        count = numbers.rnd1_quota(len(left), size, text.steps, step)
    elif rules.rounded:
        count = numbers.rounded_quota(len(left), text.steps, step)
    elif text.model.shift:
        count = numbers.dream_quota(len(left), text.steps, step, rules.eps)
    else:
        count = numbers.llada_quota(size, text.steps, step)
    if is_last:
        return order
    if 0 < count < len(order):
        text.close_choice(scores[count - 1] - scores[count])
    return order[:count]


def count_by_factor(text: Text, scores: list[float]) -> int:
    """Return how many positions the factor rule takes, by their falling scores."""
    factor = text.rules.factor
    for rank, score in enumerate(scores[1:], 1):
        text.close_choice(score - numbers.factor_limit(rank, factor))
    return numbers.factor_count(scores, factor)


def _released(size: int, steps: int, step: int) -> int:
    """Count the positions that the steps so far released, in Dream's loop by threshold."""
    if step >= steps - 1:
        return size
    return size // steps * (step + 1) + min(step + 1, size % steps)


def _transfers(text: Text, left: list[int], step: int) -> list[int]:
    """Choose as Dream's ``origin``: each position by itself, at random."""
    share = float(numbers.dream_share(text.steps, step, text.rules.eps))
    drawn = uniforms(text, numbers.ORIGIN_ORDER, left, step).tolist()
    text.close_choice(*(number - share for number in drawn))
    return [p for p, number in zip(left, drawn, strict=True) if number < share]
