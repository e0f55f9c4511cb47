"""The small part of a step as compiled code: what is planned before the logits, and decided after.

With ``compile_step`` some two hundred operations on ``[R, C]`` tensors become a few kernels
(torch.compile, each function one graph, for any number of requests), compiled at start for the
configured policy. Steps in which a request asks for another one run uncompiled: a graph of all
policies takes three times as long to compile as the rest together. So does what keeps state of its
own (bad words, log-probabilities, leads).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

BACKEND = "inductor"
# Compiled code is specialised for a length of one; other lengths share the code of the second.
WARMUP_REQUESTS = (1, 3)
# No length of a warm-up tensor may equal another one's by chance: it would be taken for the same.
WARMUP_ROWS = 11
# What torch may compile of one function in a process: twice for each engine that differs from all
# before it. Its default of eight would refuse the fifth.
COMPILED_AT_MOST = 256


def compiled(function: Callable[..., Any], backend: str = BACKEND) -> Any:
    """The function as one graph; what cannot be one raises when it is first called."""
    return torch.compile(function, fullgraph=True, backend=backend)


def of_any_length(*values: Any) -> None:
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
