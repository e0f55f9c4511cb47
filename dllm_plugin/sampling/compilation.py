"""Compile the part of a step that is neither the forward nor the read of its logits.

Planning a step and deciding it are some 250 to 300 operations on ``[R, C]`` tensors. With
``compile_step``, the default on GPUs, torch.compile makes a few kernels of them: each function is
one graph that serves any number of requests, and is compiled at start, from the same code that runs
otherwise, for the configured policy and, if they read the same of a row, `threshold` and
`low_confidence`. A graph of all policies would take three times as long to compile as everything
else together, so a step in which a request asks for another one runs uncompiled. So does a step
with an active feature: see :mod:`dllm_plugin.sampling.features.ordered`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

BACKEND = "inductor"
# Numbers of a few requests share too little memory for torch to put them into one kernel, which it
# would for one request least of all; there the launches of kernels take longer than the kernels.
FUSED = {"aggressive_fusion": True, "score_fusion_memory_threshold": 0}
# Compiled code is specialised for a length of one; other lengths share the code of the second.
WARMUP_REQUESTS = (1, 3)
# No length of a warm-up tensor may equal another one's by chance: it would be taken for the same.
WARMUP_ROWS = 11
# What torch may compile of one function in a process: twice for each engine that differs from all
# before it. Its default of eight would refuse the fifth.
COMPILED_AT_MOST = 256


def compiled(function: Callable[..., Any], backend: str = BACKEND) -> Any:
    """Return the function as one graph; what cannot be one raises when it is first called."""
    options: dict[str, Any] | None = FUSED if backend == BACKEND else None
    return torch.compile(function, fullgraph=True, backend=backend, options=options)


def allow_any_length(*values: Any) -> None:
    """Mark all tensors in nested tuples: code compiled with them serves other lengths, too."""
    for tensor in _tensors_in(values):
        if tensor.shape[0] > 1:
            torch._dynamo.mark_dynamic(tensor, 0)


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors_in(value)
