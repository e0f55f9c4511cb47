"""The decoding loops once more, a request and a position at a time: slow, obvious, independent.

Plain Python and float64; only the Dream schedule is float32, because its truncation is defined
there. Scripts as in :mod:`scripted`.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

Script = Callable[[list[int], int], np.ndarray]
WORD = (1 << 64) - 1


class Choice(NamedTuple):
    """A proposal for one masked position."""

    position: int
    token: int
    confidence: float
    score: float


class Decoded(NamedTuple):
    """The text up to and including a stop token, and what it took."""

    tokens: list[int]
    passes: int
    most_blocks: int
    most_positions: int


@dataclass
class Model:
    """A script and how its rows are read."""

    script: Script
    prompt: list[int]
    block_length: int
    max_tokens: int
    context: int
    mask: int
    stops: frozenset[int]
    shift: bool
    ranking: str = "threshold"
    temperature: float = 0.0
    seed: int = 0

    @property
    def limit(self) -> int:
        """Whole blocks are decoded, except where the context ends inside one."""
        blocks = -(-self.max_tokens // self.block_length)
        return min(len(self.prompt) + blocks * self.block_length, self.context)

    def propose(self, text: list[int], position: int, step: int) -> Choice:
        """Read the row that predicts a position, given the text of this pass."""
        query = position - self.shift
        start = len(self.prompt)
        visible = start
        if query >= start:
            visible += ((query - start) // self.block_length + 1) * self.block_length
        logits = self.script(text[: min(visible, self.limit)], position).astype(
            np.float64
        )
        logits[self.mask] = -np.inf
        if self.temperature > 0:
            logits = logits / self.temperature
        p = np.exp(logits - logits.max())
        p /= p.sum()
        token = int(p.argmax())
        if self.temperature > 0:
            token = int(
                (logits + gumbel(self.seed, position, step, len(logits))).argmax()
            )
        top = np.sort(p)
        score = {
            "entropy": float((p * np.log(p + 1e-10)).sum()),
            "topk_margin": float(top[-1] - top[-2]),
            "random": uniform(self.seed ^ 0x5D2F, position, step),
        }
        return Choice(
            position, token, float(p[token]), score.get(self.ranking, float(p[token]))
        )

    def final(self, text: list[int]) -> list[int] | None:
        """The finished text, as soon as nothing can change it any more."""
        written = list(
            itertools.takewhile(lambda t: t != self.mask, text[len(self.prompt) :])
        )
        asked = min(self.max_tokens, self.context - len(self.prompt))
        for i, token in enumerate(written[:asked]):
            if token in self.stops:
                return written[: i + 1]
        return written[:asked] if len(written) >= asked else None


def mix(x: int) -> int:
    """The SplitMix64 finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def gumbel(seed: int, position: int, step: int, size: int) -> np.ndarray:
    """The noise of (seed, position, step) for every token."""
    state = mix((seed + 0x9E3779B97F4A7C15) & WORD)
    state = mix(state ^ (position * 0x9E3779B97F4A7C15) & WORD)
    state = mix(state ^ (step * 0xBF58476D1CE4E5B9) & WORD)
    states = [mix(state ^ (token * 0x94D049BB133111EB) & WORD) for token in range(size)]
    return -np.log(-np.log([((s >> 12) + 0.5) / (1 << 52) for s in states]))


def uniform(seed: int, position: int, step: int) -> float:
    """The counter-based draw of (seed, position, step)."""
    state = mix((seed + 0x9E3779B97F4A7C15) & WORD)
    state = mix(state ^ (position * 0x9E3779B97F4A7C15) & WORD)
    state = mix(state ^ (step * 0xBF58476D1CE4E5B9) & WORD)
    return ((state >> 41) + 0.5) / (1 << 23)


@dataclass
class Block:
    """An open block of the D2F loop."""

    start: int
    stop: int
    full: bool = False

    def decided(self, text: list[int], mask: int) -> float:
        """Share of its positions that are no longer masked."""
        left = text[self.start : self.stop].count(mask)
        return (self.stop - self.start - left) / (self.stop - self.start)


def d2f(
    model: Model,
    add: float,
    activate: float,
    accept: float,
    max_blocks: int = 1000,
    max_positions: int = 100000,
) -> Decoded:
    """Discrete diffusion forcing, the prompt run by itself; unbounded unless told."""
    text, blocks, saw_stop = list(model.prompt), list[Block](), False
    step = most_blocks = most_positions = 0  # step counts the passes that denoise
    for passes in itertools.count(1):
        start = blocks[-1].stop if blocks else len(text)
        stop = min(start + model.block_length, model.limit)
        width = stop - (blocks[0].start if blocks else start)
        fits = len(blocks) < max_blocks and width <= max_positions
        last = blocks[-1].decided(text, model.mask) if blocks else 1.0
        if start < stop and not saw_stop and last >= add and fits:
            blocks.append(Block(start, stop))
            text += [model.mask] * (stop - start)
        before = 1.0
        for block in blocks:
            block.full |= before >= activate
            before = block.decided(text, model.mask)
        most_blocks = max(most_blocks, len(blocks))
        most_positions = max(most_positions, blocks[-1].stop - blocks[0].start)
        decided = [block.decided(text, model.mask) == 1.0 for block in blocks]
        num_stored, written = [*decided, False].index(False), list(text)
        for block in blocks[num_stored:]:
            masked = [
                p for p in range(block.start, block.stop) if text[p] == model.mask
            ]
            choices = [model.propose(text, p, step) for p in masked]
            taken = [c for c in choices if c.confidence > accept]
            if choices and not taken and block.full:
                taken = [max(choices, key=lambda c: c.score)]
            for choice in taken:
                written[choice.position] = choice.token
                saw_stop |= choice.token in model.stops
        text, blocks = written, blocks[num_stored:]
        step += bool(blocks)
        if (tokens := model.final(text)) is not None:
            return Decoded(tokens, passes, most_blocks, most_positions)
    raise AssertionError


Policy = Callable[[list[Choice], int, int], list[Choice]]


def block_diffusion(model: Model, policy: Policy, steps: int) -> Decoded:
    """One block after the other; passes that only store a finished block are not counted."""
    text, total = list(model.prompt), 0
    while True:
        stop = min(len(text) + model.block_length, model.limit)
        text += [model.mask] * (stop - len(text))
        for step in itertools.count():
            masked = [p for p, token in enumerate(text) if token == model.mask]
            if not masked:
                break
            choices = [model.propose(text, p, total) for p in masked]
            for choice in policy(choices, step, steps):
                text[choice.position] = choice.token
            total += 1
            if (tokens := model.final(text)) is not None:
                return Decoded(tokens, total, 1, model.block_length)


def best(choices: list[Choice], count: int) -> list[Choice]:
    """The best-scored ones; Python's sort is stable, so ties go to the lower position."""
    return sorted(choices, key=lambda c: -c.score)[:count]


def llada_quota(masks: int, steps: int) -> list[int]:
    """Positions per step of a block with so many masks."""
    return [masks // steps + (i < masks % steps) for i in range(steps)]


def dream_quota(left: int, step: int, steps: int, eps: float) -> int:
    """Positions of one time step, truncated in float32."""
    if step == steps - 1:
        return left
    t = torch.linspace(1, eps, steps + 1)
    return int(torch.tensor(float(left)) * (1 - t[step + 1] / t[step]))


def quota_policy(choices: list[Choice], step: int, steps: int) -> list[Choice]:
    """LLaDA: as many in every step; what the steps before took is no longer there."""
    return best(choices, -(-len(choices) // max(steps - step, 1)))


def time_policy(eps: float) -> Policy:
    """Dream: time steps."""
    return lambda choices, step, steps: best(
        choices, dream_quota(len(choices), min(step, steps - 1), steps, eps)
    )


def threshold_policy(threshold: float) -> Policy:
    """All above the threshold, or the best one."""

    def pick(choices: list[Choice], step: int, steps: int) -> list[Choice]:
        return [c for c in choices if c.confidence > threshold] or best(choices, 1)

    return pick


def factor_count(confidences: list[float], factor: float) -> int:
    """Fast-dLLM's dynamic rule, line by line, for confidences in falling order."""
    n = len(confidences)
    limits = [-1.0] + [1 - factor / (j + 2) for j in range(1, n)]
    first = n - 1
    for j in range(n):
        if confidences[j] < limits[j]:
            first = j
            break
    return first + 1 if first in (0, n - 1) else first


def factor_policy(factor: float) -> Policy:
    """As many as the factor rule says."""

    def pick(choices: list[Choice], step: int, steps: int) -> list[Choice]:
        ranked = sorted(choices, key=lambda c: -c.confidence)
        return ranked[: factor_count([c.confidence for c in ranked], factor)]

    return pick
