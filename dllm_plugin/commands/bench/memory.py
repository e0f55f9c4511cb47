"""What a denoising step allocates on a GPU beside weights, KV and captured graphs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dllm_plugin.commands.bench.drive import NEVER_AT_ONCE, Ask, Run, all_decode, serve

if TYPE_CHECKING:
    from vllm import LLM


class Watch:
    """Starts counting once every request is being decoded: a prompt's step allocates more."""

    def __init__(self, llm: "LLM", requests: int) -> None:
        self.llm, self.requests = llm, requests
        self.before: list[int] = []  # bytes, one entry per rank

    def tick(self, run: Run) -> None:
        """Called after every message of the engine."""
        if not self.before and all_decode(run, self.requests):
            if any(answer.finished for answer in run.answers):
                raise ValueError(NEVER_AT_ONCE.format(self.requests))
            self.before = self.llm.collective_rpc("reset_peak_bytes")


def temporary_bytes(llm: "LLM", asks: Sequence[Ask]) -> int:
    """Serve `asks` at once; the most that a rank allocated beyond what it had between two steps."""
    watch = Watch(llm, len(asks))
    serve(llm, asks, len(asks), watch.tick)
    peaks = llm.collective_rpc("peak_bytes")
    return max(peak - before for peak, before in zip(peaks, watch.before, strict=True))


def logits_bytes(llm: "LLM", positions: int, vocab_parallel: bool) -> int:
    """Of the logits of so many positions on one rank, which shares columns by `vocab_parallel`."""
    config = llm.llm_engine.vllm_config
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype), "vLLM has resolved the name"
    ranks = config.parallel_config.tensor_parallel_size if vocab_parallel else 1
    columns = -(-config.model_config.get_vocab_size() // ranks)
    return positions * columns * dtype.itemsize
