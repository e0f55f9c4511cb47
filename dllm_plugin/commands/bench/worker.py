"""What the benchmark does inside of an engine's workers, by vLLM's `worker_extension_cls`."""

from typing import TYPE_CHECKING, Any

import torch

from dllm_plugin.commands.bench.weights import fill

if TYPE_CHECKING:
    from vllm import LLM


class BenchWorker:
    """Methods that vLLM adds to the worker of every rank; ours have names that it has not."""

    def fill_weights(self, seed: int) -> None:
        """With the same numbers on every rank: of some weights (routers) each has a copy."""
        worker: Any = self
        fill(worker.get_model(), seed)

    def reset_peak_bytes(self) -> int:
        """Forget the most that was allocated; what is allocated now. On CUDA only."""
        worker: Any = self
        torch.cuda.reset_peak_memory_stats(worker.device)
        return torch.cuda.memory_allocated(worker.device)

    def peak_bytes(self) -> int:
        """The most that was allocated since `reset_peak_bytes`."""
        worker: Any = self
        return torch.cuda.max_memory_allocated(worker.device)


EXTENSION = f"{__name__}.{BenchWorker.__name__}"


def fill_weights(llm: "LLM", seed: int) -> None:
    """All ranks of an engine that was started with `EXTENSION`."""
    llm.collective_rpc("fill_weights", args=(seed,))
