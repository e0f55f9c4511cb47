"""Requests of several kinds on a scripted model, with the step compiled or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from scripted import Hashed, Loop, Run, one_thread, sampling

D2F = {"strategy": "d2f", "block_length": 4, "canvas_length": 16, "max_active_blocks": 4}
BLOCK = {"strategy": "block_diffusion", "block_length": 4, "canvas_length": 8}


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """No code of other tests; the number of threads is part of what code is specialised for."""
    with one_thread():
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def decode(dllm: dict[str, Any], shift: bool, backend: str | None) -> list[Run]:
    """Requests of several policies, lengths and temperatures, which come and go."""
    loop = Loop(dllm, shift, slots=6)
    policies = ["threshold", "threshold", "entropy", "topk_margin"]
    if dllm is BLOCK:
        policies += ["random", "factor", "low_confidence"]
    with torch.inference_mode():
        if backend is not None:
            loop.sampler.compile(backend)
        with torch._dynamo.config.patch(error_on_recompile=backend is not None):
            runs = []
            for i, policy in enumerate(policies):
                options = {"dllm_policy": policy, "seed": i, "temperature": 0.7 * (i % 2)}
                params = sampling(9 + 5 * i, None if i % 3 else 14, **options)
                if len(loop.running) == 5:
                    loop.run()
                runs.append(loop.start([3] * (i + 1), Hashed(i), params, f"{i}"))
                loop.step()
            loop.run()
    return runs
