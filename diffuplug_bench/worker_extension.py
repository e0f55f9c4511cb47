"""Add the benchmark's methods to an engine's workers, by vLLM's `worker_extension_cls`."""

from typing import TYPE_CHECKING, Any

import torch

from diffuplug_bench.acceptance import drawn
from diffuplug_bench.random_weights import fill

if TYPE_CHECKING:
    from vllm import LLM


class BenchWorker:
    """Extend the worker of every rank; its own methods have other names."""

    def fill_weights(self, seed: int) -> None:
        """Fill the model; same seed on all ranks, as some weights (routers) are replicated."""
        worker: Any = self
        fill(worker.get_model(), seed)

    def accept(self, p0: float, lam: float, seed: int) -> None:
        """Accept masks by drawn numbers, the same on all ranks, in place of confidences."""
        worker: Any = self
        decider = worker.model_runner.model_state.sampler.decider
        decider.policy_rules["threshold"] = drawn(p0, lam, seed, worker.device)

    def reset_peak_bytes(self) -> int:
        """Reset the peak of allocated memory and return what is allocated now. CUDA only."""
        worker: Any = self
        torch.cuda.reset_peak_memory_stats(worker.device)
        return torch.cuda.memory_allocated(worker.device)

    def peak_bytes(self) -> int:
        """Return the peak of allocated memory since `reset_peak_bytes`."""
        worker: Any = self
        return torch.cuda.max_memory_allocated(worker.device)


EXTENSION = f"{__name__}.{BenchWorker.__name__}"


def fill_weights(llm: "LLM", seed: int) -> None:
    """Fill the model on all ranks of an engine that was started with `EXTENSION`."""
    llm.collective_rpc("fill_weights", args=(seed,))
