"""Random weights of the size that models have, in place of vLLM's dummy ones.

Those are a thousandth at most, norms included. Under them all masks of a canvas come to the same
hidden state. Products of rows that are alike seem to be faster than a model's (865 TFLOP/s in an
engine where the floor's random rows had 667, benchmarks/reports/h200_steps.md), and a mixture of
experts reads the few experts that all of them are routed to.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm import LLM

# Of a uniform distribution with the deviation 0.02, which models are initialised with.
BOUND = 0.02 * 3**0.5


class RandomWeights:
    """vLLM's `worker_extension_cls`: every rank fills the weights that it has.

    With the same numbers, so that what ranks have copies of (routers, shared KV heads) is equal.
    """

    def fill_weights(self, seed: int) -> None:
        """Of one rank; see :func:`fill`."""
        worker: Any = self
        fill(worker.get_model(), seed)


EXTENSION = f"{__name__}.{RandomWeights.__name__}"


def fill(model: torch.nn.Module, seed: int) -> None:
    """Matrices uniform within `BOUND`, norms one, biases zero; in place, as graphs read them.

    Of floating-point weights. On a CPU vLLM has packed most matrices by now: those keep its own.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-BOUND, BOUND, generator=generator)


def fill_engine(llm: "LLM", seed: int) -> None:
    """All ranks of an engine that was started with `EXTENSION`."""
    llm.collective_rpc("fill_weights", args=(seed,))
