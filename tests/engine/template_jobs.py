"""Requests with gaps to fill, and what the plain loops make of them."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from engines import MASK_IDS, a_prompt
from full_jobs import (
    CANVAS,
    CONTEXT,
    TOO_CLOSE,
    Decoder,
    FullJob,
    approximations_for,
    numbers_for,
)

from dllm_plugin.reference.text import FILL, Text


@dataclass(frozen=True)
class GapJob(FullJob):
    """One request whose answer has given positions; `max_tokens` is where its last gap ends."""

    template: tuple[int, ...] = ()

    def wish(self, **options: Any) -> Any:
        """SamplingParams."""
        return super().wish(dllm_template=list(self.template), **options)

    def text(self, decoder: Decoder, canvas: int, lost: Collection[int]) -> Text:
        """The text that the plain loops decode."""
        text = super().text(decoder, canvas, lost)
        text.template = list(self.template)
        return text


def gap_job(
    prompt: list[int],
    template: list[int],
    numbers: dict[str, Any] | None = None,
    stop: tuple[int, ...] = (),
) -> GapJob:
    """A job whose `max_tokens` its template says."""
    end = max(i for i, token in enumerate(template) if token == FILL) + 1
    return GapJob(prompt, end, numbers or {}, stop, tuple(template))


def random_template(draw: random.Random, mask_id: int, most: int) -> list[int]:
    """One to three gaps, pins between them, and mostly a tail."""
    template: list[int] = []
    for gap in range(draw.choice([1, 1, 2, 3])):
        if gap or draw.random() < 0.15:
            template += [
                draw.randrange(mask_id) for _ in range(draw.choice([1, 2, 5, 20]))
            ]
        template += [FILL] * draw.choice([1, 3, 8, 14])
    if draw.random() < 0.85:
        template += [draw.randrange(mask_id) for _ in range(draw.choice([1, 4, 12]))]
    while len(template) > most or FILL not in template:
        template = template[1:] if FILL in template[1:] else [FILL, *template[2:]]
    return template


def random_gap_jobs(
    decoder: Decoder,
    wanted: int,
    seed: int = 0,
    approximate: bool = False,
    suffix: int = 0,
) -> list[tuple[GapJob, Text]]:
    """Jobs without close calls, some with a stop token in their single gap.

    A `suffix` of so many tokens stands after what a canvas may contain.
    """
    draw, found = random.Random(f"gaps {decoder} {seed}"), []
    mask_id = min(MASK_IDS[decoder[0]], 250)
    for trial in range(6 * wanted):
        numbers = numbers_for(decoder, draw)
        numbers.pop("cfg_scale", None)
        if draw.random() < 0.5:
            numbers.pop("block_length", None)
        if approximate:
            numbers |= approximations_for(decoder, draw)
            numbers.pop("suffix_window", None)
        length = (
            draw.randint(1, 60)
            if draw.random() < 0.8
            else CONTEXT - draw.randint(2, 30)
        )
        length = min(length, CONTEXT - CANVAS - suffix) if suffix else length
        template = random_template(draw, mask_id, min(CANVAS, CONTEXT - length))
        template += [draw.randrange(mask_id) for _ in range(suffix)]
        job = gap_job(a_prompt(length, trial), template, numbers)
        text = job.decode(decoder)
        single = template.count(FILL) == job.max_tokens
        if single and draw.random() < 0.4 and text.margin > TOO_CLOSE:
            job = gap_job(job.prompt, template, numbers, (draw.choice(text.answer()),))
            text = job.decode(decoder)
        if text.margin > TOO_CLOSE:
            found.append((job, text))
        if len(found) == wanted:
            return found
    raise AssertionError("too many close calls")
