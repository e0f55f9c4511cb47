"""Measure what a denoising step allocates on a GPU besides weights, KV and captured graphs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from diffuplug_bench.request_loop import NEVER_AT_ONCE, Ask, Run, all_decode, serve

if TYPE_CHECKING:
    from vllm import LLM


class Watch:
    """Start counting when every request is being decoded, as a prompt's step allocates more."""

    def __init__(self, llm: "LLM", requests: int) -> None:
        self.llm, self.requests = llm, requests
        self.before: list[int] = []  # bytes, one entry per rank

    def tick(self, run: Run) -> None:
        """Reset the peak once; called after every message of the engine."""
        if not self.before and all_decode(run, self.requests):
            if any(answer.finished for answer in run.answers):
                raise ValueError(NEVER_AT_ONCE.format(self.requests))
            self.before = self.llm.collective_rpc("reset_peak_bytes")


def temporary_bytes(llm: "LLM", asks: Sequence[Ask]) -> int:
    """Serve `asks` at once; return the most that a rank allocated within a step, in bytes."""
    watch = Watch(llm, len(asks))
    serve(llm, asks, len(asks), watch.tick)
    peaks = llm.collective_rpc("peak_bytes")
    return max(peak - before for peak, before in zip(peaks, watch.before, strict=True))


def logits_bytes(llm: "LLM", positions: int, vocab_parallel: bool) -> int:
    """Return the bytes of the logits of so many positions on one rank.

    With `vocab_parallel` a rank holds its share of the columns.
    """
    config = llm.llm_engine.vllm_config
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype), "vLLM has resolved the name"
    ranks = config.parallel_config.tensor_parallel_size if vocab_parallel else 1
    columns = -(-config.model_config.get_vocab_size() // ranks)
    return positions * columns * dtype.itemsize
