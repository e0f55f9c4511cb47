"""D2F requests with their expected tokens and forwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from engines import CHECKPOINTS, a_prompt, generate, params, results

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Result, Text

CANVAS = 128  # the engine's default at block lengths up to 32


@cache
def plain_model(family: str) -> PlainModel:
    """A tiny checkpoint in plain torch."""
    return PlainModel.load(CHECKPOINTS / f"tiny-{family}")


def d2f_rules(block_length: int, **numbers: Any) -> Rules:
    """Options of D2F's plain loop; as many active blocks as the engine has by default."""
    bounds = {"canvas_length": CANVAS, "max_active_blocks": 8}
    return Rules("d2f", block_length=block_length, **(bounds | numbers))


@dataclass(frozen=True)
class Job:
    """One request; `numbers` are D2F's, without their prefix."""

    prompt: tuple[int, ...]
    max_tokens: int
    block_length: int = 16
    numbers: tuple[tuple[str, float], ...] = field(default=())

    def wish(self) -> Any:
        """SamplingParams."""
        numbers = {f"dllm_{name}": value for name, value in self.numbers}
        return params(self.max_tokens, dllm_block_length=self.block_length, **numbers)

    @cache  # noqa: B019 - a handful of jobs, kept for the session on purpose
    def expected(self, family: str, max_model_len: int = 256) -> Result:
        """Tokens and denoising forwards by the plain loop."""
        rules = d2f_rules(self.block_length, **dict(self.numbers))
        prompt, model = list(self.prompt), plain_model(family)
        text = Text(model, prompt, self.max_tokens, rules, (), max_model_len)
        return decode(text)


def job(
    prompt_length: int,
    max_tokens: int,
    block_length: int = 16,
    seed: int = 0,
    **numbers: float,
) -> Job:
    """A job on a prompt without pattern."""
    prompt = tuple(a_prompt(prompt_length, seed))
    return Job(prompt, max_tokens, block_length, tuple(sorted(numbers.items())))


MIXED = (
    job(1, 40, 16),
    job(17, 64, 16, seed=1, threshold=0.7),
    job(45, 50, 8, seed=2, block_add_threshold=0.5, decoded_token_threshold=0.5),
    job(60, 96, 32, seed=3, threshold=0.6),
    job(32, 33, 4, seed=4),
    job(70, 70, 16, seed=5, block_add_threshold=0.0, decoded_token_threshold=1.0),
    job(25, 64, 16, seed=6, block_add_threshold=1.0),
    job(33, 80, 16, seed=7, threshold=0.5),
)


def run(llm: Any, jobs: Sequence[Job]) -> list[tuple[list[int], int]]:
    """Tokens and forwards of all jobs, submitted together."""
    outputs = generate(llm, [list(j.prompt) for j in jobs], [j.wish() for j in jobs])
    return results(outputs)


def check(llm: Any, family: str, jobs: Sequence[Job], max_model_len: int = 256) -> None:
    """Submit all jobs together and compare each."""
    for one, got in zip(jobs, run(llm, jobs), strict=True):
        assert got == one.expected(family, max_model_len), one
