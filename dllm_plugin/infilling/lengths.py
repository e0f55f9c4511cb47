"""Choose the lengths of gaps: which to try, how to score them, which is best.

A model trained on fixed positions fills exactly the given positions. So each length is
decoded, and the fill that fits the text after it best is taken.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from dllm_plugin.config.options import FILL
from dllm_plugin.config.validation import shown

from .gaps import ANY, AUTO, MOST_LENGTHS, Encode, Filled, Gapped, Part, place, too_many

STEPS = (4, 8, 16, 32, 64, 128)  # what `auto` tries
NUM_SCORED = 4  # tokens of the tail


class Scoring(NamedTuple):
    """Describe one forward that scores tokens of a text.

    places  of these tokens in the text
    """

    text: list[int]
    places: tuple[int, ...]

    @property
    def template(self) -> list[int]:
        """Return the text with these tokens masked."""
        template = list(self.text)
        for position in self.places:
            template[position] = FILL
        return template

    @property
    def targets(self) -> list[int]:
        """Return these tokens."""
        return [self.text[place] for place in self.places]


def lengths_of(asked: Any, most: int, fewest: int, room: int) -> list[int]:
    """Return the lengths to try before a suffix, ascending.

    Args:
        asked: an integer, a list, or "auto": what fits of `STEPS` and `most`.
        most: `max_tokens`.
        fewest: `min_tokens`.
        room: positions that the gap may take.
    Raises:
        ValueError: if it is none of these, or `most` leaves no position.
    """
    if most < 1:
        raise ValueError(f"suffix needs max_tokens of at least 1, got {shown(most)}.")
    if asked == AUTO:
        found = [length for length in (*STEPS, most) if fewest <= length <= most]
        fitting = sorted({length for length in found if length <= room})
        # If not even one position fits, the refusal names the shortest.
        return fitting or [min(most, max(room, fewest, 1))]
    lengths = asked if isinstance(asked, list) else [asked]
    if not 1 <= len(lengths) <= MOST_LENGTHS or not all(
        type(length) is int and 1 <= length <= most for length in lengths
    ):
        raise ValueError(
            f'lengths must be an integer, "{AUTO}" or at most {MOST_LENGTHS} integers from 1 to '
            f"max_tokens {most}, got {shown(asked)}."
        )
    return sorted(set(lengths))


def each_choice(parts: list[Part], room: int) -> list[list[Part]]:
    """Return the parts with each combination of lengths; with `auto` each that fits.

    Args:
        room: positions for gaps. If no choice fits, the refusal names the shortest.
    Raises:
        ValueError: for more combinations than are tried.
    """
    beside = room - (most_positions(parts) - STEPS[0])
    choices: list[list[Part]] = []
    for part in parts:
        if isinstance(part, str):
            choices.append([part])
            continue
        lengths = part or tuple(length for length in STEPS if length <= beside)
        choices.append([(length,) for length in lengths or (max(beside, 1),)])
    found = _combined(choices, room if ANY in parts else math.inf)
    if len(found) > MOST_LENGTHS:
        raise too_many(math.prod(map(len, choices)))
    return found or [[choice[0] for choice in choices]]


def _combined(choices: list[list[Part]], room: float) -> list[list[Part]]:
    """Return the combinations that fit; if they are too many, some of what they begin with."""
    left = room - sum(_positions(choice[0]) for choice in choices)
    if left < 0:
        return []
    found: list[tuple[float, list[Part]]] = [(left, [])]
    for choice in choices:
        longer = [(_positions(part) - _positions(choice[0]), part) for part in choice]
        # What is kept fits with the shortest of the others: each leads to a combination.
        found = [
            (left - more, [*chosen, part])
            for left, chosen in found
            for more, part in longer
            if more <= left
        ]
        if len(found) > MOST_LENGTHS:
            break
    return [chosen for _, chosen in found]


def _positions(part: Part) -> int:
    return 0 if isinstance(part, str) else part[0]


def most_positions(parts: list[Part]) -> int:
    """Return the most positions that the gaps may have; `auto` counts with its fewest."""
    gaps = [part for part in parts if not isinstance(part, str)]
    return sum(max(gap, default=STEPS[0]) for gap in gaps)


def place_each(
    parts: list[Part],
    prompt: list[int] | None,
    first: Encode,
    rest: Encode,
    canvas: int,
    context: int,
    fewest: int = 0,
) -> list[Gapped]:
    """Return where everything stands, for each combination of lengths (see `place`).

    Args:
        fewest: `min_tokens`; of `auto` only answers of as many positions are tried.
    """
    first, rest = cache(first), cache(rest)
    least: list[Part] = [part if isinstance(part, str) else (1,) for part in parts]
    short = place(least, prompt, first, rest)
    between = len(short.given) - len(short.tail)
    room = room_for_gaps(
        canvas - between, context - len(short.prompt) - between, short.tail
    )
    placed = [place(one, prompt, first, rest) for one in each_choice(parts, room)]
    if ANY not in parts:
        return placed
    # If none is long enough, the refusal names the longest.
    return [one for one in placed if one.end >= fewest] or placed[-1:]


def room_for_gaps(canvas: int, context: int, tail: Sequence[int]) -> int:
    """Return how many positions gaps may take, of several lengths.

    Of the tail only the tokens by which lengths are scored need positions of the canvas.

    Args:
        canvas, context: positions for gaps and tail, of a canvas and of the context.
    """
    return min(canvas - len(tail[:NUM_SCORED]), context - len(tail))


def canvas_positions(choices: Sequence[Gapped]) -> int:
    """Return the canvas positions of the longest choice."""
    longest = max(gapped.end for gapped in choices)
    if len(choices) == 1:
        return longest
    return longest + len(choices[0].tail[:NUM_SCORED])


def scoring_of(gapped: Gapped, gaps: list[Filled]) -> Scoring:
    """Return the forward that scores fills by their tail; no places without a tail."""
    fills = iter(gaps)
    pieces = [next(fills).tokens if FILL in piece else piece for piece in gapped.pieces]
    text = [token for piece in pieces for token in piece]
    start = len(text) - len(gapped.tail)
    return Scoring(text, tuple(range(start, len(text)))[:NUM_SCORED])


def score_of(
    gaps: list[Filled], logprobs: Sequence[float], of_tail: Sequence[float]
) -> float:
    """Return the score of one choice of lengths.

    Args:
        gaps: what they got; of an empty one its end token counts.
        logprobs: of the answer's tokens, when they were decided.
        of_tail: of the tail's first tokens after the fills.
    """
    of_fill = [
        logprob
        for gap in gaps
        for logprob in logprobs[gap.first : gap.first + max(len(gap.tokens), 1)]
    ]
    return fmean(of_fill) + (fmean(of_tail) if of_tail else 0.0)


def best_of(scores: Sequence[float]) -> int:
    """Return the best choice; of equal choices the first, which is the shorter."""
    return max(range(len(scores)), key=lambda i: scores[i])


def told(choices: Sequence[Gapped], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Return the scores as a reply has them; `length` is a list for several gaps."""
    entries = []
    for gapped, score in zip(choices, scores, strict=True):
        lengths = [part[0] for part in gapped.parts if not isinstance(part, str)]
        length = lengths if len(lengths) > 1 else lengths[0]
        entries.append({"length": length, "score": score})
    return entries
