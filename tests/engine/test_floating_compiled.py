"""Floating canvases with the step compiled: the same text, in the same steps."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from mixed import fresh_compiler
from scripted import Loop, Run, sampling
from scripted_rows import Hashed

FLOATING = {
    "strategy": "d2f",
    "adaptive": "throughput",
    "block_length": 4,
    "canvas_length": 12,
}


class FloatingLoop(Loop):
    """Requests of widths that change with every step, each in its own way."""

    def width(self, run: Run) -> int:
        return 1 + (5 * len(run.passes) + len(run.prompt)) % self.canvas_length

    def _rows(self, run: Run, fed: int) -> Iterable[np.ndarray]:
        """Rows that see what is fed, which is more than some of them do in a model."""
        start, _, canvas, _ = self._look(run)
        text = run.prompt + run.output + canvas[:fed]
        return [
            run.script(text, query + self.shift) for query in range(start, start + fed)
        ]


def decode(dllm: dict[str, Any], shift: bool, backend: str | None) -> list[Run]:
    """Requests that come and go, some of them sampled."""
    loop, runs = FloatingLoop(dllm, shift, slots=6), []
    with torch.inference_mode():
        if backend is not None:
            loop.sampler.compile(backend)
        with torch._dynamo.config.patch(error_on_recompile=backend is not None):
            for i in range(10):
                while len(loop.running) == 5:
                    loop.step()
                wish = sampling(
                    20 + i, None if i % 3 else 14, seed=i, temperature=0.7 * (i % 2)
                )
                runs.append(loop.start([3] * (i + 1), Hashed(i), wish, f"{i}"))
                loop.step()
            loop.run()
    return runs


@pytest.mark.parametrize("shift", [False, True])
def test_compiled_steps_take_the_same_decisions(shift: bool) -> None:
    with fresh_compiler():
        plain, compiled = (
            decode(FLOATING, shift, backend) for backend in (None, "eager")
        )
    for one, other in zip(plain, compiled, strict=True):
        assert one.output == other.output and len(one.passes) == len(other.passes)
        assert [step.commit for step in one.passes] == [
            step.commit for step in other.passes
        ]
